"""`parallelize`: makes a diffusers pipeline or transformer compute on all GPUs, in place; `release` undoes it.

Every rank builds the same pipeline and makes the same calls with it. The transformer keeps its class, weights, names,
config and adapters; only its `forward` is replaced (`seqpar.adapter.call`). All ranks end with rank 0's pictures.
When it wins: for every pipeline that this package has no loop of its own for. A loop of our own keeps the state
sharded from step to step and is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from seqpar.adapter import cuts as plans
from seqpar.adapter import estimate, generic, sharing
from seqpar.adapter import native as native_body
from seqpar.adapter.body import Body
from seqpar.adapter.call import Call
from seqpar.adapter.cuts import Cuts
from seqpar.adapter.foreign import BEFORE, look, refuse_split
from seqpar.adapter.hooks import is_offloaded, refuse_backends
from seqpar.adapter.sharing import Wished
from seqpar.engine.distributed import settled
from seqpar.engine.graphs import Capture, CudaCapture
from seqpar.inputs import agree
from seqpar.mesh import Axis, Mesh
from seqpar.planner.plan import Plan, make
from seqpar.planner.search import Wish
from seqpar.sampling.ddpm import check_variances, learns_range
from seqpar.sampling.original import pass_variances

PipeT = TypeVar("PipeT")
NAMES = ("transformer", "transformer_2")  # a pipeline's transformers; Wan 2.2 has one for early and one for late steps
BACKENDS = "cpu:gloo,cuda:nccl"  # of the process group that is made where torch's default one has only NCCL
# methods that change what a transformer computes: a call that was promised is computed before them
CHANGING = (
    *("add_adapter", "delete_adapters", "set_adapter", "set_adapters", "enable_adapters", "disable_adapters"),
    *("load_lora_adapter", "unload_lora", "enable_lora", "disable_lora", "fuse_lora", "unfuse_lora"),
    *("set_attn_processor", "fuse_qkv_projections", "unfuse_qkv_projections", "enable_cache", "disable_cache"),
    *("set_attention_backend", "reset_attention_backend", "register_forward_hook", "register_forward_pre_hook"),
    *("load_state_dict", "train", "to"),
)
INSTALLED = ("forward", "__reduce_ex__", "cache_context", *CHANGING)  # attributes of a parallelized transformer


def parallelize(
    pipe_or_transformer: PipeT,
    mesh: Mesh | None = None,
    *,
    strategy: str = "auto",
    local: str = "auto",
    transport: str = "auto",
    native: bool = True,
    plan: Cuts | Mapping[str, Any] | None = None,
    vae: Wished = "auto",
    cfg: bool = True,
) -> PipeT:
    """Make a diffusers pipeline or transformer compute on the ranks of a mesh, in place, and return it.

    mesh, strategy, local, transport: the caller's choices; the planner decides once on those that are None or "auto".
    native: whether a model of this package may compute on the transformer's weights, which is faster. plan: where the
    tokens of a transformer are split, as `seqpar.adapter.cuts.Cuts` or diffusers' `_cp_plan`; None takes what is known
    of its class. vae: whether the VAE computes by strips; where it cannot, True is a ValueError and "auto" prints why.
    "tiled" decodes whole pictures by diffusers' tiling, which needs the least memory and leaves seams.
    cfg: whether ranks may compute both branches of guidance at the same time; False lets all share the tokens. Rank 0's
    inputs are used on every rank; `release` puts everything back. Raises ValueError alike on all ranks.
    """
    found, ranks = transformers_of(pipe_or_transformer), mesh or Mesh.joined()
    cuts = ranks.together(lambda: _all_checked(pipe_or_transformer, found, plan, vae, cfg, mesh))
    wish = Wish(strategy=strategy, local=local, transport=transport)
    layout = _planned(pipe_or_transformer, found, mesh, wish, native, cfg)
    lease = _leased(layout, mesh)
    bodies = _bodies(pipe_or_transformer, found, lease, layout, cuts, native)
    _install_all(pipe_or_transformer, found, bodies, lease, layout)
    _share_vae(pipe_or_transformer, found, lease, layout, vae)
    return pipe_or_transformer


def release(pipe_or_transformer: Any) -> None:
    """Undo `parallelize`: free graphs and exchanges and restore the transformer, on all ranks at the same time."""
    found: list[tuple[nn.Module, Any]] = []
    for module in transformers_of(pipe_or_transformer).values():
        call: Any = vars(module).get("forward")
        if not isinstance(call, Call):
            raise ValueError(
                f"got {type(module).__name__} that is not parallelized, or that has hooks on its forward since then, "
                f"expected the result of parallelize; remove such hooks first"
            )
        call.check_delivered()
        found.append((module, call))
    for module, call in found:
        call.release()
        before: Before = vars(module).pop(BEFORE)
        for name in INSTALLED:
            vars(module).pop(name, None)
        vars(module).update(before.attributes)
        before.lease.leave()


def transformers_of(pipe_or_transformer: Any) -> dict[str, nn.Module]:
    """Return the transformers of a pipeline by name, or the transformer itself; ValueError if there is none."""
    if isinstance(pipe_or_transformer, nn.Module):
        return {"transformer": pipe_or_transformer}
    found = {name: getattr(pipe_or_transformer, name, None) for name in NAMES}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not modules:
        raise ValueError(
            f"got {type(pipe_or_transformer).__name__} without {' or '.join(NAMES)}, expected a diffusers "
            f"transformer or a pipeline that has one"
        )
    return modules


class Lease:
    """What a call of `parallelize` has made for its transformers, which the release of the last one frees.

    mesh: the mesh of the calls. groups: the process groups that were made for it; not those of a caller's mesh.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[dist.ProcessGroup]) -> None:
        self.mesh, self._groups = mesh, groups
        self._ends: list[Callable[[], None]] = []
        self._users = 0

    def join(self, module: nn.Module) -> Before:
        """Count a transformer, and return what its release puts back."""
        self._users += 1
        return Before({name: x for name, x in vars(module).items() if name in INSTALLED}, self)

    def at_end(self, end: Callable[[], None]) -> None:
        """Remember what is called when the last transformer is released."""
        self._ends.append(end)

    def leave(self) -> None:
        """Count a transformer's release; every rank must call this at the same time."""
        self._users = max(0, self._users - 1)  # it is 0 before anyone has joined
        if self._users:
            return
        for end in self._ends:
            end()
        if self._groups and self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # nothing of a group may run when it ends
        for group in self._groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Before:
    """A transformer before `parallelize`: the attributes that were set on the object itself, and its call's lease."""

    attributes: Mapping[str, Any]
    lease: Lease


def _install_all(
    pipe_or_transformer: Any, found: Mapping[str, nn.Module], bodies: Mapping[str, Body], lease: Lease, plan: Plan
) -> None:
    """Put calls into the places of all transformers, which nothing can fail any more, and say so on rank 0."""
    mesh = lease.mesh
    calls = {name: Call(found[name], mesh, body, _capture(mesh, body)) for name, body in bodies.items()}
    for name, call in calls.items():
        vars(found[name])[BEFORE] = lease.join(found[name])
        install(found[name], call)
        if mesh.is_main:
            print(_summary(found[name], call.body, mesh, plan), flush=True)
    if _takes_variances(pipe_or_transformer):
        lease.at_end(pass_variances(pipe_or_transformer))


def _share_vae(
    pipe_or_transformer: Any, found: Mapping[str, nn.Module], lease: Lease, plan: Plan, wish: Wished
) -> None:
    """Let a pipeline's VAE take rank 0's input and, if that is wished, compute on all ranks until the release."""

    def check() -> None:
        for module in found.values():
            call: Any = module.forward
            call.check_delivered()

    lease.at_end(sharing.share_vae(pipe_or_transformer, lease.mesh, plan.transport.name, wish, check))


def install(module: nn.Module, call: Call) -> None:
    """Put a call into the place of a transformer's forward, follow labels and changes, and refuse copies."""

    def refuse_copy(protocol: object) -> NoReturn:
        raise ValueError(
            "got a parallelized transformer to copy or pickle, expected a plain one; call seqpar.release first"
        )

    named, theirs = vars(module), getattr(module, "cache_context", None)
    named |= {name: _settling(call, getattr(module, name)) for name in CHANGING if hasattr(module, name)}
    named["forward"], named["__reduce_ex__"] = call, refuse_copy
    if theirs is None:
        return

    @wraps(theirs)
    def cache_context(name: str, *args: Any, **kwargs: Any) -> Any:
        return call.labelled(name, theirs(name, *args, **kwargs))

    named["cache_context"] = cache_context


def _settling(call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a transformer that first computes what was promised, with the module as it was then."""

    @wraps(method)
    def settled(*args: Any, **kwargs: Any) -> Any:
        call.settle()
        return method(*args, **kwargs)

    return settled


def _all_checked(
    pipe_or_transformer: Any,
    found: Mapping[str, nn.Module],
    plan: Cuts | Mapping[str, Any] | None,
    vae: Wished,
    cfg: bool,
    mesh: Mesh | None,
) -> dict[str, Cuts]:
    """Return where each transformer is cut; ValueError if one, the pipeline's scheduler or an argument does not fit."""
    if not isinstance(cfg, bool):
        raise ValueError(f"got cfg={cfg!r}, expected True or False")
    if not cfg and mesh is not None and mesh.cfg.size > 1:
        raise ValueError(f"got cfg=False and a mesh with cfg={mesh.cfg.size}, expected one with cfg=1")
    _takes_variances(pipe_or_transformer)
    sharing.check_wish(pipe_or_transformer, vae)
    return {name: _checked(module, plan) for name, module in found.items()}


def _checked(module: nn.Module, plan: Cuts | Mapping[str, Any] | None) -> Cuts:
    """Return where a transformer is cut; ValueError if it cannot be parallelized as it is now."""
    name = type(module).__name__
    if name == "OptimizedModule":
        raise ValueError(
            "got a compiled transformer, expected a plain one; call parallelize first and then, if at all, its "
            "compile_repeated_blocks(): calls are CUDA graphs already"
        )
    if isinstance(vars(module).get("forward"), Call):
        raise ValueError(
            f"got {name} that is parallelized already, expected a plain one; a pipeline that shares it (from_pipe) "
            f"can be called as it is; call seqpar.release to parallelize it in another way"
        )
    if getattr(module, "_parallel_config", None) is not None:
        raise ValueError(f"got {name} with diffusers' enable_parallelism, expected none; load it without")
    if is_offloaded(module):
        raise ValueError(f"got {name} whose weights are offloaded, expected none: they must stay on the GPU")
    if next(module.parameters(), None) is None:
        raise ValueError(f"got {name} without parameters, expected a diffusers transformer")
    if next(module.parameters()).device.type == "meta":
        raise ValueError(f"got {name} without weights (on the meta device), expected a loaded one")
    return plans.of(module, plan)


def _takes_variances(pipe: Any) -> bool:
    """Return whether a pipeline cuts the variances off that its scheduler needs; ValueError if its model has none."""
    named = any(kind.__name__ == "DiTPipeline" for kind in type(pipe).__mro__)
    if not named or not learns_range(pipe.scheduler):
        return False
    check_variances(pipe.transformer.config)
    return True


def _guided(pipe_or_transformer: Any, found: Mapping[str, nn.Module]) -> bool:
    """Return whether two branches of guidance can be expected that may be computed apart from each other."""
    perturbed = hasattr(pipe_or_transformer, "set_pag_applied_layers")  # its processors read the rows of all branches
    apart = all(look(module).coupled is None for module in found.values())
    return apart and not perturbed and estimate.is_guided(next(iter(found.values())))


def _planned(
    pipe_or_transformer: Any, found: Mapping[str, nn.Module], mesh: Mesh | None, wish: Wish, native: bool, cfg: bool
) -> Plan:
    """Return the planner's plan for one picture of the first transformer's family, computed natively if it can be."""
    guided = _guided(pipe_or_transformer, found) and cfg if mesh is None else mesh.cfg.size > 1
    module = next(iter(found.values()))
    dtype = estimate.dtype_of(module)
    ours = native and native_body.why_not(module) is None
    work = estimate.native_work(module) if ours else estimate.work_of(module)
    load = estimate.load_of(module, dtype, guided, work.joined)
    return make(work, load, dtype, mesh or Mesh.joined(), wish, mesh)


def _move(pipe_or_transformer: Any, found: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Move a pipeline to this rank's device, if a transformer is elsewhere."""
    if any(x.device != mesh.device for module in found.values() for x in module.parameters()):
        pipe_or_transformer.to(mesh.device)


def _leased(plan: Plan, mesh: Mesh | None) -> Lease:
    """Make the mesh of a plan, or take the caller's, and return what is made for it."""
    made = _with_host_group(settled(plan, mesh))
    return Lease(made, _made_groups(made, mesh))


def _with_host_group(mesh: Mesh) -> Mesh:
    """Return a mesh whose ranks can compare small numbers on the host, where the process group has only NCCL.

    Without it, the comparison that each call begins with would wait for the GPU.
    """
    if not _lacks_host(mesh):
        return mesh
    group: Any = dist.new_group(backend=BACKENDS)
    return replace(mesh, world=replace(mesh.world, group=group))


def _lacks_host(mesh: Mesh) -> bool:
    if mesh.world.size == 1 or mesh.device.type == "cpu":
        return False
    return "cpu:" not in dist.get_backend_config(mesh.world.group)


def _made_groups(mesh: Mesh, given: Mesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of a mesh that `parallelize` has made: not torch's default one, nor a caller's."""
    kept = [dist.group.WORLD, *((axis.group for axis in _axes(given)) if given else ())]
    found = {id(axis.group): axis.group for axis in _axes(mesh) if axis.group is not None}
    return [group for group in found.values() if not any(group is other for other in kept)]


def _axes(mesh: Mesh) -> tuple[Axis, ...]:
    return mesh.data, mesh.cfg, mesh.ring, mesh.ulysses, mesh.sequence, mesh.replica, mesh.world


def _bodies(
    pipe_or_transformer: Any,
    found: Mapping[str, nn.Module],
    lease: Lease,
    plan: Plan,
    cuts: Mapping[str, Cuts],
    native: bool,
) -> dict[str, Body]:
    """Move a pipeline to this rank's device, and return what computes its transformers.

    If a ValueError is raised, which all ranks raise alike, what was made is freed. After other errors nothing is freed,
    because the other ranks may not take part.
    """
    mesh, bodies = lease.mesh, dict[str, Body]()
    try:
        mesh.together(lambda: _move(pipe_or_transformer, found, mesh))
        for name, module in found.items():
            bodies[name] = _body(module, mesh, plan, cuts[name], native)
    except ValueError:
        for body in bodies.values():
            body.release()
        lease.leave()
        raise
    return bodies


def _body(module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts, wished: bool) -> Body:
    """Return what computes a transformer: the native model if it is wished and can, or the transformer's modules."""
    reason = mesh.together(lambda: _reason(module, mesh, wished))
    agree(mesh, {"computation": f"by its own modules, because {reason}" if reason else "by the native model"})
    if reason is None:
        return native_body.build(module, mesh, plan, cuts)
    if wished and mesh.is_main and native_body.knows(module):
        print(f"seqpar: the transformer's own modules compute, because {reason}", flush=True)
    return generic.build(module, mesh, plan, cuts)


def _reason(module: nn.Module, mesh: Mesh, wished: bool) -> str | None:
    """Return why a transformer's own modules compute, or None; ValueError if neither they nor a native model can."""
    refuse_backends(module)
    if mesh.sequence.size > 1:
        refuse_split(module)
    return native_body.why_not(module) if wished else "native is False"


def _capture(mesh: Mesh, body: Body) -> Capture | None:
    """Return what captures calls on a GPU; None, with the reason printed, where the body's calls cannot be captured."""
    if mesh.device.type != "cuda":
        return None
    reason = body.why_eager()
    if reason is not None and mesh.is_main:
        print(f"seqpar: calls run without CUDA graphs, because {reason}", flush=True)
    return CudaCapture() if reason is None else None


def _summary(module: nn.Module, body: Body, mesh: Mesh, plan: Plan) -> str:
    by = type(body).__module__.rpartition(".")[2]
    how = f"{plan.strategy.name} by {plan.transport.name}, " if mesh.sequence.size > 1 else ""
    return f"seqpar: {type(module).__name__} runs on {mesh} ({by}; {how}attention {plan.local.name})"
