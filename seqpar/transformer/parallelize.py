"""`parallelize`: run a diffusers pipeline or transformer on all GPUs, in place; `release` undoes it.

`refresh` lets the next call rescan what calls do not compare.

Every rank builds the same pipeline and makes the same calls with it. The transformer keeps its class, weights, names,
config and adapters; only its `forward` is replaced (`seqpar.transformer.call`). All ranks return rank 0's images.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqpar.families._cuts import Cuts, check_joined
from seqpar.families._find import cuts_of, is_guided, is_known
from seqpar.graphs.graphs import Capture, CudaCapture
from seqpar.loading.parts import transformers_of
from seqpar.loading.schedulers import check_variances, learns_range, pass_variances
from seqpar.mesh import exact
from seqpar.mesh.inputs import agree
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.watch import Watch
from seqpar.planner.plan import Plan, check_names, make, named_mesh, preferred_images, settled
from seqpar.planner.search import Preferences
from seqpar.transformer import estimate
from seqpar.transformer.attention import refuse_backends
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.changes import REFRESHES
from seqpar.transformer.estimate import dtype_of
from seqpar.transformer.foreign import CALL, is_offloaded, look, refuse, refuse_compiled
from seqpar.transformer.hooks import ShardedModule
from seqpar.types.arguments import check_kind
from seqpar.vae import pipeline as sharing
from seqpar.vae.pipeline import VaeMode

# where diffusers defines pipelines whose calls are known, and the base classes of all, of which a user's own derive
PIPELINES = ("diffusers.pipelines.", "diffusers.modular_pipelines.")
BASES = ("diffusers.pipelines.pipeline_utils", "diffusers.modular_pipelines.modular_pipeline")


def choices(
    mesh: Mesh | str | None, preferences: Preferences, native: bool, cfg: bool
) -> tuple[Mesh | None, Preferences]:
    """Return the caller's mesh and choices (`named_mesh`); ValueError for those that are none or contradict."""
    own, preferences = named_mesh(mesh, preferences)
    check_names(preferences.strategy, preferences.local, preferences.transport)
    check_kind("native", native, bool, expected="True or False")
    check_kind("cfg", cfg, bool, expected="True or False")
    branches = own.cfg.size if own is not None else preferences.axes.get("cfg", 1)
    if not cfg and branches > 1:
        raise ValueError(f"cfg=False contradicts a mesh with cfg={branches}; use a mesh with cfg=1")
    return own, preferences


def all_checked(
    pipe_or_transformer: Any, modules: Mapping[str, nn.Module], cuts: Cuts | Mapping[str, Any] | None, vae: VaeMode
) -> dict[str, Cuts]:
    """Return where each transformer is cut; ValueError if one, the pipeline's scheduler or an argument does not fit."""
    check_kind("cuts", cuts, Cuts, Mapping, type(None), expected="seqpar.families.Cuts, or diffusers' _cp_plan")
    takes_variances(pipe_or_transformer)
    sharing.check_mode(type(pipe_or_transformer).__name__, getattr(pipe_or_transformer, "vae", None), vae)
    return {name: _checked_cuts(module, cuts) for name, module in modules.items()}


def _checked_cuts(module: nn.Module, cuts: Cuts | Mapping[str, Any] | None) -> Cuts:
    """Return where a transformer is cut; ValueError if it cannot be parallelized as it is now."""
    name = type(module).__name__
    refuse_compiled(module)
    if call_of(module) is not None:
        raise ValueError(
            f"got {name} that is parallelized already, expected a plain one; a pipeline that shares it (from_pipe) "
            f"can be called as it is; call seqpar.release to parallelize it in another way"
        )
    if getattr(module, "_parallel_config", None) is not None:
        raise ValueError(f"{name} with diffusers' enable_parallelism is not supported; load it without")
    if is_offloaded(module):
        raise ValueError(f"{name} has offloaded weights; parallelize needs them on the GPU: load it without offload")
    if next(module.parameters(), None) is None:
        raise ValueError(f"got {name} without parameters, expected a diffusers transformer")
    if next(module.parameters()).device.type == "meta":
        raise ValueError(f"got {name} without weights (on the meta device), expected a loaded one")
    return cuts_of(module, cuts)


def takes_variances(pipe: Any) -> bool:
    """Return whether a pipeline cuts the variances off that its scheduler needs; ValueError if its model has none."""
    named = any(kind.__name__ == "DiTPipeline" for kind in type(pipe).__mro__)
    if not named or not learns_range(pipe.scheduler):
        return False
    check_variances(pipe.transformer.config)
    return True


def cfg_by_default(pipe_or_transformer: Any, module: nn.Module) -> bool:
    """Return whether a cfg axis may be chosen: only where guidance is known to compute two branches per step.

    A transformer of no known family may be called once per step, and a pipeline that is not diffusers' in any way; half
    of the ranks would then repeat what the others compute.
    """
    if not is_known(module) or not is_guided(module):
        return False
    homes = {kind.__module__ for kind in type(pipe_or_transformer).__mro__} - set(BASES)
    return isinstance(pipe_or_transformer, nn.Module) or any(home.startswith(PIPELINES) for home in homes)


def _guided(pipe_or_transformer: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether two branches of guidance can be expected that may be computed apart from each other.

    In exact mode they are not, because many pipelines make them one batch, whose rows stay together then.
    """
    perturbed = hasattr(pipe_or_transformer, "set_pag_applied_layers")  # its processors read the rows of all branches
    apart = all(look(module).coupled is None for module in modules.values())
    default = cfg_by_default(pipe_or_transformer, next(iter(modules.values())))
    return apart and not perturbed and not exact.is_on() and default


def planned(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
    mesh: Mesh | None,
    preferences: Preferences,
    native: bool,
    cfg: bool,
) -> Plan:
    """Return the planner's plan for one picture of the first transformer's family.

    native: whether functions of `seqpar.families` may compute.
    """
    axis = mesh.cfg.size if mesh is not None else preferences.axes.get("cfg")
    guided = _guided(pipe_or_transformer, modules) and cfg if axis is None else axis > 1
    module = next(iter(modules.values()))
    dtype = estimate.dtype_of(module)
    work = estimate.planned_work(module, native)
    ranks = mesh or Mesh.joined()
    load = replace(estimate.load_of(module, dtype, guided, work.joined), images=preferred_images(preferences, ranks))
    return make(work, load, dtype, ranks, preferences, mesh)


BACKENDS = "cpu:gloo,cuda:nccl"  # of the process group that is made where torch's default one has only NCCL


class Handle:
    """What one `parallelize` has made, freed with its last transformer.

    mesh: the mesh of the calls. groups: process groups that were made for it, without those of a caller's mesh.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[dist.ProcessGroup]) -> None:
        self.mesh, self._groups = mesh, groups
        self.ends = ExitStack()  # what is undone when the last transformer is released
        self._users = 0
        self._collected = finalize(self, _drop, groups, mesh.device.type, mesh.world.watch)
        self._collected.atexit = False

    @staticmethod
    def of(plan: Plan, mesh: Mesh | None) -> Handle:
        """Make the mesh of a plan, or take the caller's; ValueError from `settled`, the same on all ranks."""
        _destroy_dropped(mesh or Mesh.joined())
        planned_mesh = _with_host_group(mesh or Mesh.from_env(*plan.sizes.values()))
        handle = Handle(planned_mesh, _new_groups(planned_mesh, mesh))
        try:
            settled(plan, planned_mesh)
        except ValueError:
            handle.leave()
            raise
        return handle

    def join(self, call: ShardedCall) -> None:
        """Count a transformer, whose release leaves."""
        self._users += 1
        call.ends.callback(self.leave)

    def leave(self) -> None:
        """Count a transformer's release; collective."""
        self._users = max(0, self._users - 1)  # it is 0 before any has joined
        if self._users:
            return
        self.ends.close()
        if self._groups and self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # nothing of a group may run when it ends
        self._collected.detach()
        for group in self._groups:
            _destroy(group)


def call_of(module: nn.Module) -> ShardedCall | None:
    """Return the call of a transformer, or None if it is not parallelized.

    It is held beside `module.forward`, because users wrap that.
    """
    return vars(module).get(CALL)


def _drop(groups: Sequence[dist.ProcessGroup], device: str, watch: Watch | None) -> None:
    # The transformers were collected without a release, at different times on the ranks. Destroying a group of NCCL
    # waits for its other ranks, which may wait for this one, so it is left to the next `parallelize`; so is any group
    # that another thread collects, because the watchdog's thread must not wait.
    at_once = device == "cpu" and threading.current_thread() is threading.main_thread()
    for group in groups:
        if at_once:
            _destroy(group)
        elif watch is not None:
            watch.dropped[group.group_name] = group


def _destroy_dropped(mesh: Mesh) -> None:
    """Destroy the groups that all of their ranks have dropped; collective."""
    if mesh.world.size == 1 or mesh.world.watch is None:
        return
    dropped, ranks = mesh.world.watch.dropped, mesh.world.ranks
    per_rank = dict(zip(ranks, mesh.collect(sorted(dropped), list[str]), strict=True))
    for name, group in sorted(dropped.items()):  # in one order on all ranks
        if all(name in per_rank.get(rank, ()) for rank in dist.get_process_group_ranks(group)):
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            _destroy(dropped.pop(name))


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # torch has destroyed it with all others
        dist.destroy_process_group(group)


def _with_host_group(mesh: Mesh) -> Mesh:
    """Return a mesh whose ranks can compare small numbers on the host, where the process group has only NCCL.

    Without it, the comparison that each call begins with would wait for the GPU.
    """
    if _has_host(mesh):
        return mesh
    group: Any = dist.new_group(backend=BACKENDS)
    return replace(mesh, world=replace(mesh.world, group=group))


def _has_host(mesh: Mesh) -> bool:
    return mesh.world.size == 1 or mesh.device.type == "cpu" or "cpu:" in dist.get_backend_config(mesh.world.group)


def _new_groups(mesh: Mesh, callers: Mesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of a mesh that were made for it: not torch's default one, nor those of a caller."""
    retained = [dist.group.WORLD, *((axis.group for axis in _axes(callers)) if callers else ())]
    groups = {id(axis.group): axis.group for axis in _axes(mesh) if axis.group is not None}
    return [group for group in groups.values() if not any(group is other for other in retained)]


def _axes(mesh: Mesh) -> tuple[Axis, ...]:
    return mesh.data, mesh.cfg, mesh.ring, mesh.ulysses, mesh.sequence, mesh.replica, mesh.world


@contextmanager
def passing(pipe: Any, boundary: Callable[[], None]) -> Iterator[None]:
    """Pass a boundary before each call of a parallelized pipeline's transformers, VAE and encoders, in this context.

    boundary: such as `seqpar.mesh.boundary.StepBoundary`. What it raises ends the pipeline's call, after which the
    pipeline can be called again. Every rank must do so at the same time. Raises ValueError for a pipeline that is not
    parallelized.
    """
    calls = [call for _, call in _calls_of(pipe)]
    for call in calls:
        call.boundary = boundary
    parts = [part for name, part in pipe.components.items() if name.startswith(ENCODERS)]
    handles = [part.register_forward_pre_hook(lambda *_: boundary()) for part in parts if isinstance(part, nn.Module)]
    try:
        yield
    finally:
        for call in calls:
            call.boundary = None
        for handle in handles:
            handle.remove()


ENCODERS = ("text_encoder", "image_encoder")  # how the names of parts begin that never see the latents
HALF = 2  # bytes of a weight that rounds the state
PREPARES = "prepare_latents"  # the method of a pipeline that draws the noise


def keep_fp32(pipe: Any) -> str | None:
    """Let a parallelized pipeline keep its state in fp32 until the release; return why it does not, or None.

    Every rank must call this after `parallelize`, before the pipeline's first call.
    """
    modules = transformers_of(pipe)
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    others = [name for name in parts if name not in (*modules, "vae") and not name.startswith(ENCODERS)]
    if others:
        return f"{others[0]} may read the latents, too"
    dtypes = {dtype_of(module) for module in modules.values()}
    if any(dtype.itemsize != HALF for dtype in dtypes):
        return f"the transformer has weights of {', '.join(sorted(map(str, dtypes)))}".replace("torch.", "")
    calls = [call for _, call in _calls_of(pipe)]
    for call in calls:
        call.keep_fp32(dtype_of(call.sharded.module))
    calls[0].ends.callback(_prepare_fp32(pipe))
    return None


def _prepare_fp32(pipe: Any) -> Callable[[], None]:
    """Convert the latents that a pipeline's loop begins with; return a function that undoes it."""
    theirs, before = getattr(pipe, PREPARES, None), vars(pipe).get(PREPARES)
    if theirs is None:
        return lambda: None

    @wraps(theirs)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        latents = theirs(*args, **kwargs)
        if isinstance(latents, tuple):
            return (_converted(latents[0]), *latents[1:])
        return _converted(latents)

    def end() -> None:
        if vars(pipe).get(PREPARES) is prepared:  # otherwise someone has wrapped it since
            del vars(pipe)[PREPARES]
            if before is not None:
                vars(pipe)[PREPARES] = before

    prepared.__signature__ = inspect.signature(theirs)  # pyright: ignore[reportAttributeAccessIssue]
    vars(pipe)[PREPARES] = prepared
    return end


def _converted(latents: Any) -> Any:
    return latents.to(torch.float32) if isinstance(latents, Tensor) else latents


PipeT = TypeVar("PipeT")
# methods that change what a transformer computes: a deferred call is computed before them
CHANGING = (
    *("add_adapter", "delete_adapters", "set_adapter", "set_adapters", "enable_adapters", "disable_adapters"),
    *("load_lora_adapter", "unload_lora", "enable_lora", "disable_lora", "fuse_lora", "unfuse_lora"),
    *("set_attn_processor", "fuse_qkv_projections", "unfuse_qkv_projections", "enable_cache", "disable_cache"),
    *("set_attention_backend", "reset_attention_backend", "register_forward_hook", "register_forward_pre_hook"),
    *("load_state_dict", "train", "to"),
)
INSTALLED = (
    "forward",
    "__reduce_ex__",
    "cache_context",
    REFRESHES,
    *CHANGING,
)  # attributes of a parallelized transformer


def parallelize(
    pipe_or_transformer: PipeT,
    mesh: Mesh | str | None = None,
    *,
    strategy: str = "auto",
    local: str = "auto",
    transport: str = "auto",
    native: bool = True,
    cuts: Cuts | Mapping[str, Any] | None = None,
    vae: VaeMode = "auto",
    cfg: bool = True,
) -> PipeT:
    """Make a diffusers pipeline or transformer compute on the ranks of a mesh, in place, and return it.

    mesh, strategy, local, transport: the caller's choices; the planner decides once on those that are None or "auto".
    mesh may be what `--mesh` takes, as "cfg=2,ulysses=2"; "throughput" plans for a picture a rank in each call.
    native: whether blocks of this package may compute on the transformer's weights, which is faster. cuts: where the
    tokens of a transformer are split, as `seqpar.families.Cuts` or diffusers' `_cp_plan`; None takes the
    known ones of its class. vae: whether the VAE computes by strips; where it cannot, True is a ValueError and "auto"
    prints why; "tiled" is diffusers' tiling, which has seams. cfg: whether ranks may compute both branches of guidance
    at once. Every rank uses rank 0's inputs; `release` puts everything back. Raises ValueError alike on all ranks.
    """
    names: Any = {"strategy": strategy, "local": local, "transport": transport}
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()

    # all that can be wrong is found before anything changes
    own, preferences = ranks.on_all_ranks(lambda: choices(mesh, Preferences(**names), native, cfg))
    modules = ranks.on_all_ranks(lambda: transformers_of(pipe_or_transformer))
    where = ranks.on_all_ranks(lambda: all_checked(pipe_or_transformer, modules, cuts, vae))
    axes = mesh if own is None else own.sizes
    agree(ranks, {"mesh": axes, **names, "native": native, "vae": vae, "cfg": cfg})

    # one plan, and what it needs: process groups, hooks on the transformers, exchanges
    plan = planned(pipe_or_transformer, modules, own, preferences, native, cfg)
    handle = Handle.of(plan, own)
    sharded = _sharded(pipe_or_transformer, modules, handle, plan, where, native)

    # calls in place of the forwards, and the VAE
    for module in sharded:
        call = install(module, handle)
        if handle.mesh.is_main:
            print(_summary(call), flush=True)
    if takes_variances(pipe_or_transformer):
        handle.ends.callback(pass_variances(pipe_or_transformer))
    _share_vae(pipe_or_transformer, modules, handle, plan, vae)
    return pipe_or_transformer


def refresh(pipe_or_transformer: Any) -> None:
    """Let the next call rescan everything, also what calls do not compare: buffers, attributes. Collective.

    Call it at any time between two calls; it changes no result. The next call of a kind is captured again. Raises
    ValueError for what is not parallelized.
    """
    for module, call in _calls_of(pipe_or_transformer):
        call.settle()
        vars(module)[REFRESHES] = vars(module).get(REFRESHES, 0) + 1


def release(pipe_or_transformer: Any) -> None:
    """Undo `parallelize`: free graphs and exchanges and restore the transformer. Collective."""
    calls = _calls_of(pipe_or_transformer)
    for _, call in calls:
        call.check_delivered()
    for module, call in calls:
        call.release()
        vars(module).pop(CALL)
        vars(module).pop(REFRESHES, None)
        call.ends.close()


def _calls_of(pipe_or_transformer: Any) -> list[tuple[nn.Module, ShardedCall]]:
    """Return the transformers with their calls; ValueError if one is not parallelized."""
    modules = transformers_of(pipe_or_transformer).values()
    calls = [(module, call) for module in modules if (call := call_of(module)) is not None]
    if len(calls) < len(modules):
        raise ValueError(f"{type(pipe_or_transformer).__name__} is not parallelized; call seqpar.parallelize first")
    return calls


def install(sharded: ShardedModule, handle: Handle) -> ShardedCall:
    """Put a call in place of a transformer's forward, follow labels and changes, and refuse copies.

    The call's `ends` take all off again, except for what users have put around it.
    """
    module = sharded.module
    before = {name: x for name, x in vars(module).items() if name in INSTALLED}
    call = vars(module)[CALL] = ShardedCall(sharded, _capture(sharded), before)
    handle.join(call)

    def refuse_copy(protocol: object) -> NoReturn:
        raise ValueError("A parallelized transformer cannot be copied or pickled; call seqpar.release first")

    theirs: Any = getattr(module, "cache_context", None)

    def cache_context(name: str, *args: Any, **kwargs: Any) -> Any:
        return call.labelled(name, theirs(name, *args, **kwargs))

    # a hook, because it is called where users have replaced the forward, too
    call.ends.callback(module.register_forward_hook(call.check_reached).remove)
    ours: dict[str, Any] = {name: _settling(call, getattr(module, name)) for name in CHANGING if hasattr(module, name)}
    ours |= {"forward": call, "__reduce_ex__": refuse_copy}
    if theirs is not None:
        ours["cache_context"] = wraps(theirs)(cache_context)
    vars(module).update(ours)
    call.ends.callback(_uninstall, call, ours)
    return call


def _uninstall(call: ShardedCall, ours: Mapping[str, Any]) -> None:
    """Put attributes back as they were before; what users have put around ours since then stays."""
    attributes = vars(call.sharded.module)
    for name, value in ours.items():
        if attributes.get(name) is value:
            del attributes[name]
            attributes |= {name: call.before[name]} if name in call.before else {}
    call.stand_aside(call.before.get("forward"))


def _settling(call: ShardedCall, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a transformer that first computes a deferred call, with the module as it was then."""

    @wraps(method)
    def settled(*args: Any, **kwargs: Any) -> Any:
        call.settle()
        return method(*args, **kwargs)

    return settled


def _share_vae(
    pipe_or_transformer: Any, modules: Mapping[str, nn.Module], handle: Handle, plan: Plan, mode: VaeMode
) -> None:
    """Let a pipeline's VAE take rank 0's input and, as wished, compute on all ranks until the release."""

    def calls() -> list[ShardedCall]:
        return [call for module in modules.values() if (call := call_of(module)) is not None]

    def check() -> None:
        for call in calls():
            call.check_delivered()
        for call in calls()[:1]:
            call.pass_boundary()

    handle.ends.callback(sharing.share_vae(pipe_or_transformer, handle.mesh, plan.transport.name, mode, check))
    if handle.mesh.world.size > 1 and hasattr(pipe_or_transformer, "vae"):
        same = sharing.same_vae(pipe_or_transformer)
        for call in calls():
            call.check = same


def _sharded(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
    handle: Handle,
    plan: Plan,
    cuts: Mapping[str, Cuts],
    native: bool,
) -> list[ShardedModule]:
    """Move a pipeline to this rank's device, and put hooks on its transformers.

    If a ValueError is raised, the same on all ranks, all of it is freed. After other errors nothing is freed, because
    the other ranks may not take part.
    """
    mesh, sharded = handle.mesh, list[ShardedModule]()

    def check() -> None:
        for name, module in modules.items():
            refuse_backends(module)
            refuse(module, mesh, cuts[name].why_not(module), look(module))
            if mesh.sequence.size > 1:
                check_joined(module, cuts[name])

    try:
        mesh.on_all_ranks(check)
        mesh.on_all_ranks(lambda: _move(pipe_or_transformer, modules, mesh))
        for name, module in modules.items():
            sharded.append(ShardedModule(module, mesh, plan, cuts[name], native))
    except ValueError:
        for module in sharded:
            module.release()
        handle.leave()
        raise
    return sharded


def _move(pipe_or_transformer: Any, modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    if any(x.device != mesh.device for module in modules.values() for x in module.parameters()):
        pipe_or_transformer.to(mesh.device)


def _capture(sharded: ShardedModule) -> Capture | None:
    """Return what captures calls on a GPU; None, with the reason printed, where calls cannot be captured."""
    mesh = sharded.state.mesh
    if mesh.device.type != "cuda":
        return None
    reason = sharded.cuts.why_eager(sharded.module)
    if reason is not None and mesh.is_main:
        print(f"seqpar: calls run without CUDA graphs, because {reason}", flush=True)
    return CudaCapture() if reason is None else None


def _summary(call: ShardedCall) -> str:
    mesh, plan, by = call.mesh, call.state.plan, call.sharded.texts()["computation"]
    how = f"{plan.strategy.name} by {plan.transport.name}, " if mesh.sequence.size > 1 else ""
    local = f"attention {plan.local.name}{', exact mode' if plan.exact else ''}"
    return f"seqpar: {type(call.sharded.module).__name__} runs on {mesh} ({by}; {how}{local})"
