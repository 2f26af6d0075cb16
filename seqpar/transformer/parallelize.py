"""`parallelize`: run a diffusers pipeline or transformer on all GPUs, in place; `release` undoes it.

Every rank builds the same pipeline and makes the same calls with it. The transformer keeps its class, weights, names,
config and adapters; only its `forward` is replaced (`seqpar.transformer.call`). All ranks return rank 0's images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import islice
from typing import Any, NoReturn, TypeVar

from diffusers.hooks.first_block_cache import FirstBlockCacheConfig, apply_first_block_cache
from torch import nn

from seqpar._moved import successors
from seqpar.families._cuts import Cuts, check_joined
from seqpar.families._find import cuts_of, is_guided, pairs_calls, steps_of
from seqpar.families._modular import calls_twice, is_guided_by, is_modular
from seqpar.graphs.graphs import Capture, CudaCapture
from seqpar.kernels.weight8 import Weight8
from seqpar.loading.encoders import NAMES as ENCODERS
from seqpar.loading.parking import bring, seat_of
from seqpar.loading.parts import transformers_of
from seqpar.mesh import exact
from seqpar.mesh.inputs import agree
from seqpar.mesh.mesh import Mesh, OwnedMesh
from seqpar.planner.plan import Plan, check_names, is_lossy, make, named_mesh, preferred_images, settled
from seqpar.planner.search import Preferences
from seqpar.transformer import estimate
from seqpar.transformer.attention import refuse_backends
from seqpar.transformer.attention8 import check_steps, keeps_dtype
from seqpar.transformer.budget import Budget, Lossy, check_budget
from seqpar.transformer.calibration import Calibration, Precision, check_precision, fixed_run, why_not
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.changes import REFRESHES
from seqpar.transformer.estimate import dtype_of
from seqpar.transformer.foreign import CALL, is_offloaded, look, refuse, refuse_compiled
from seqpar.transformer.hooks import ShardedModule
from seqpar.transformer.internals import cache_config, hooks_on, unregister
from seqpar.transformer.step_cache import StepCache, StepCaching, check_blocks_for, step_cache
from seqpar.types.arguments import check_kind, shown
from seqpar.types.say import say
from seqpar.vae import pipeline as sharing
from seqpar.vae.pipeline import VaeMode

# where diffusers defines pipelines whose calls are known, and the base classes of all, of which a user's own derive
PIPELINES = ("diffusers.pipelines.", "diffusers.modular_pipelines.")
BASES = ("diffusers.pipelines.pipeline_utils", "diffusers.modular_pipelines.modular_pipeline")


def choices(
    mesh: Mesh | str | None, preferences: Preferences, native: bool, cfg: bool
) -> tuple[Mesh | None, Preferences]:
    """Return the caller's mesh and preferences (`named_mesh`); ValueError for unknown or contradictory ones."""
    own, preferences = named_mesh(mesh, preferences)
    check_names(preferences.strategy, preferences.local, preferences.transport)
    check_kind("native", native, bool, expected="True or False")
    check_kind("cfg", cfg, bool, expected="True or False")
    branches = own.cfg.size if own is not None else preferences.axes.get("cfg", 1)
    if not cfg and branches > 1:
        raise ValueError(f"cfg=False contradicts a mesh with cfg={branches}; use a mesh with cfg=1")
    return own, preferences


def _checked_cuts(module: nn.Module, cuts: Cuts | Mapping[str, Any] | None) -> Cuts:
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
    if all(x.device.type == "meta" for x in islice(module.parameters(), 1)):
        raise ValueError(f"got {name} without weights, expected a loaded diffusers transformer")
    return cuts_of(module, cuts)


def cfg_by_default(pipe_or_transformer: Any, module: nn.Module) -> bool:
    """Return whether a cfg axis may be chosen: only where guidance is known to compute two branches per step.

    A transformer of no known family may be called once per step, and a pipeline that is not diffusers' in any way; half
    of the ranks would then repeat what the others compute.
    """
    if not pairs_calls(module) or not is_guided(module):
        return False
    if is_modular(pipe_or_transformer) and not is_guided_by(pipe_or_transformer):
        return False
    homes = {kind.__module__ for kind in type(pipe_or_transformer).__mro__} - set(BASES)
    return isinstance(pipe_or_transformer, nn.Module) or any(home.startswith(PIPELINES) for home in homes)


def planned(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
    mesh: Mesh | None,
    preferences: Preferences,
    native: bool,
    cfg: bool,
    precision: Precision | None = None,
) -> Plan:
    # the plan for one picture of the first transformer's family
    module, axis = next(iter(modules.values())), mesh.cfg.size if mesh is not None else preferences.axes.get("cfg")
    if axis is not None:
        guided = axis > 1
    else:  # in exact mode the branches stay together, because many pipelines make them one batch
        guided = cfg and not exact.is_on() and cfg_by_default(pipe_or_transformer, module)
        guided = guided and not hasattr(pipe_or_transformer, "set_pag_applied_layers")  # PAG reads rows of all branches
        guided = guided and all(look(part).coupled is None for part in modules.values())
    bring(module)
    dtype, work, ranks = dtype_of(module), estimate.planned_work(module, native), mesh or Mesh.joined()
    work = replace(work, rounds=True)
    images, eight = preferred_images(preferences, ranks), precision is not None
    load = replace(estimate.load_of(module, dtype, guided, work.joined), images=images, eight=eight)
    held = [x for part in modules.values() if part is module or seat_of(part) is None for x in part.parameters()]
    stored = sum(x.numel() for x in held if isinstance(x, Weight8))
    load = replace(load, parameters=sum(x.numel() for x in held), stored=stored)
    return make(work, load, dtype, ranks, preferences, mesh)


class Handle:
    """What one `parallelize` has made, freed with its last transformer: process groups, and what `ends` undoes.

    plan, mesh: of the calls. Raises ValueError from `settled`, the same on all ranks.
    """

    def __init__(self, plan: Plan, callers: Mesh | None) -> None:
        self.plan, self._owned = plan, OwnedMesh(callers, plan.sizes)
        self.mesh, self._users = self._owned.mesh, 0
        self.ends = ExitStack()  # what is undone when the last transformer is released
        try:
            settled(plan, self.mesh)
        except ValueError:
            self.leave()
            raise

    def join(self, call: ShardedCall) -> None:
        """Hold this until a transformer is released."""
        self._users += 1
        call.ends.callback(self.leave)

    def leave(self) -> None:
        """End one hold, and with the last one all; collective."""
        self._users = max(0, self._users - 1)  # it is 0 before any has joined
        if self._users:
            return
        self.ends.close()
        self._owned.end()


def call_of(module: nn.Module) -> ShardedCall | None:
    """Return the call of a transformer, or None if it is not parallelized."""
    return vars(module).get(CALL)  # beside `module.forward`, because users wrap that


@contextmanager
def passing(pipe: Any, boundary: Callable[[], None]) -> Iterator[None]:
    """Pass a boundary before each call of a parallelized pipeline's transformers, VAE and encoders, in this context.

    boundary: such as `seqpar.mesh.boundary.StepBoundary`. What it raises ends the pipeline's call, after which the
    pipeline can be called again. Every rank must do so at the same time. Raises ValueError for a pipeline that is not
    parallelized.
    """
    calls = [call for _, call in calls_of(pipe)]
    for call in calls:
        call.boundary = boundary
        call.reset()
    parts = [part for name, part in pipe.components.items() if name.startswith(ENCODERS)]
    handles = [part.register_forward_pre_hook(lambda *_: boundary()) for part in parts if isinstance(part, nn.Module)]
    try:
        yield
    finally:
        for call in calls:
            call.boundary = None
            call.reset()
        for handle in handles:
            handle.remove()


PipeT = TypeVar("PipeT")
# methods that change what a transformer computes: a deferred call is computed before them
CHANGING = (
    *("add_adapter", "delete_adapters", "set_adapter", "set_adapters", "enable_adapters", "disable_adapters"),
    *("load_lora_adapter", "unload_lora", "enable_lora", "disable_lora", "fuse_lora", "unfuse_lora"),
    *("set_attn_processor", "fuse_qkv_projections", "unfuse_qkv_projections", "enable_cache", "disable_cache"),
    *("set_attention_backend", "reset_attention_backend", "register_forward_hook", "register_forward_pre_hook"),
    *("load_state_dict", "train", "to"),
)
# attributes of a parallelized transformer
RESETS = "_reset_stateful_cache"  # the method by which diffusers' pipelines end a run of their transformers' caches
FIRST_BLOCK = ("FBCHeadBlockHook", "FBCBlockHook")  # diffusers' hooks of FirstBlockCache
UNBOUNDED = 1_000_000  # steps that it leaves out in a row: it has no bound
INSTALLED = ("forward", "__reduce_ex__", "cache_context", RESETS, REFRESHES, *CHANGING)


@successors
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
    precision: Precision | None = None,
    calibrate: Callable[[], object] | Mapping[str, Calibration] | None = None,
    min_psnr: float | None = None,
    budget_steps: int | None = None,
    cache: StepCache | str | None = None,
    attention_steps: str | None = None,
) -> PipeT:
    """Make a diffusers pipeline or transformer compute on the ranks of a mesh, in place, and return it.

    mesh, strategy, local, transport: the caller's choices; the planner decides once on those that are None or "auto".
    mesh may be what `--mesh` takes, as "cfg=2,ulysses=2"; "throughput" plans for a picture a rank in each call.
    native: whether blocks of this package may compute on the transformer's weights, which is faster. cuts: where the
    tokens of a transformer are split, as `seqpar.families.Cuts` or diffusers' `_cp_plan`; None takes the
    known ones of its class. vae: whether the VAE computes by strips; where it cannot, True is a ValueError and "auto"
    prints why; "tiled" is diffusers' tiling, which has seams. cfg: whether ranks may compute both branches of guidance
    at once. precision: "fp8" computes most GEMMs of fused blocks in 8 bits, with an error (docs/precision.md); None
    keeps the weights' dtype. local: "fp8" does so for attention, on Hopper; attention_steps: in steps START:STOP alone,
    such as "2:-2", all but the first two and the last two. calibrate: a function that calls the pipeline or transformer
    with typical inputs, or what `seqpar.transformer.calibration.calibrated` returned; None uses fixed prompts, which
    takes seconds once a model.
    min_psnr: in dB, takes the GEMMs in the weights' dtype and the cache's threshold that `seqpar.keep_budget` or
    `seqpar verify` found for it, and budget_steps steps (None: the pipeline's own number) of its scheduler; without a
    result a ValueError.
    cache: leaves most blocks of similar steps out, with an error (docs/caching.md): "dbcache" or "taylorseer", maybe
    with options ("dbcache:threshold=0.2,head=2"), or `seqpar.StepCache`.
    Every rank uses rank 0's inputs; `release` puts everything back. Raises ValueError alike on all ranks.
    """
    names: Any = {"strategy": strategy, "local": local, "transport": transport}
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()

    # all that can be wrong is found before anything changes
    def checked() -> tuple[Mesh | None, Preferences, dict[str, nn.Module], dict[str, Cuts], Budget | None]:
        own, preferences = choices(mesh, Preferences(**names), native, cfg)
        modules = transformers_of(pipe_or_transformer)
        check_kind("cuts", cuts, Cuts, Mapping, type(None), expected="seqpar.families.Cuts, or diffusers' _cp_plan")
        sharing.check_mode(type(pipe_or_transformer).__name__, getattr(pipe_or_transformer, "vae", None), vae)
        _check_precision(precision, calibrate, native, modules, ranks, is_lossy(local))
        if is_lossy(local) and calibrate is None and (reason := fixed_run(pipe_or_transformer)[1]) is not None:
            raise ValueError(f'local="{local}" takes the means of keys and values out before it rounds: {reason}')
        steps = step_cache(cache)
        check_budget(min_psnr, budget_steps, precision, steps)
        check_steps(attention_steps, is_lossy(local), min_psnr)
        if attention_steps is not None:
            keeps_dtype(pipe_or_transformer, attention_steps)
        if min_psnr is not None and isinstance(calibrate, Mapping):
            raise ValueError("got min_psnr= with a calibration, expected None or a function for calibrate=")
        whose: Any = {"precision": precision, "cache": steps, "attention": is_lossy(local)}
        budget = None if min_psnr is None else Budget.of(pipe_or_transformer, min_psnr, budget_steps, **whose)
        where = {name: _checked_cuts(module, cuts) for name, module in modules.items()}
        if is_modular(pipe_or_transformer) and calls_twice(pipe_or_transformer):  # whose two calls have no names
            where = {name: replace(of, calls_twice=True) for name, of in where.items()}
        check_blocks_for(steps, modules.values())
        return own, preferences, modules, where, budget

    own, preferences, modules, where, budget = ranks.on_all_ranks(checked)
    axes = mesh if own is None else own.sizes
    steps = step_cache(cache)
    how = {"precision": precision, "calibrate": type(calibrate).__name__, "budget": budget, "cache": steps}
    how["attention_steps"] = attention_steps
    agree(ranks, {"mesh": axes, **names, "native": native, "vae": vae, "cfg": cfg, **how})

    # one plan, and what it needs: process groups, hooks on the transformers, exchanges
    plan = planned(pipe_or_transformer, modules, own, preferences, native, cfg, precision)
    handle = Handle(plan, own)

    lossy = Lossy(precision is not None, is_lossy(local), steps, calibrate, budget)
    sharded = _sharded(pipe_or_transformer, modules, handle, where, native, lossy)

    # calls in place of the forwards
    for module in sharded:
        call = install(module, handle)
        if attention_steps is not None:
            call.keeps_attention = partial(keeps_dtype, pipe_or_transformer, attention_steps)
        say(_summary(call), handle.mesh)

    # the VAE takes rank 0's input and, as asked for, computes on all ranks until the release
    def calls() -> list[ShardedCall]:
        return [call for module in modules.values() if (call := call_of(module)) is not None]

    def check() -> None:
        for call in calls():
            call.check_delivered()
        for call in calls()[:1]:
            call.pass_boundary()

    handle.ends.callback(sharing.share_vae(pipe_or_transformer, handle.mesh, plan.transport.name, vae, check))
    if handle.mesh.world.size > 1 and hasattr(pipe_or_transformer, "vae"):
        same = sharing.same_vae(pipe_or_transformer)
        for call in calls():
            call.check = same
    return pipe_or_transformer


def refresh(pipe_or_transformer: Any) -> None:
    """Let the next call rescan everything, also what calls do not compare: buffers, attributes. Collective.

    Call it at any time between two calls; it changes no result. The next call of a kind is captured again. Raises
    ValueError for what is not parallelized.
    """
    for module, call in calls_of(pipe_or_transformer):
        call.settle()
        vars(module)[REFRESHES] = vars(module).get(REFRESHES, 0) + 1


def release(pipe_or_transformer: Any) -> None:
    """Undo `parallelize`: free graphs and exchanges and restore the transformer. Collective."""
    calls = calls_of(pipe_or_transformer)
    for _, call in calls:
        call.check_delivered()
    for module, call in calls:
        call.release()
        vars(module).pop(CALL)
        vars(module).pop(REFRESHES, None)
        call.ends.close()


def calls_of(pipe_or_transformer: Any) -> list[tuple[nn.Module, ShardedCall]]:
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
    attributes = vars(module)
    before = {name: x for name, x in attributes.items() if name in INSTALLED}
    call = attributes[CALL] = ShardedCall(sharded, _capture(sharded), before)
    handle.join(call)

    def refuse_copy(protocol: object) -> NoReturn:
        raise ValueError("A parallelized transformer cannot be copied or pickled; call seqpar.release first")

    def settling(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def changing(*args: Any, **kwargs: Any) -> Any:
            call.settle()  # a deferred call is computed with the module as it is now
            bring(module)
            return method(*args, **kwargs)

        return changing

    theirs: Any = getattr(module, "cache_context", None)

    def cache_context(name: str, *args: Any, **kwargs: Any) -> Any:
        return call.labelled(name, theirs(name, *args, **kwargs))

    resets: Any = getattr(module, RESETS, None)

    def reset(*args: Any, **kwargs: Any) -> None:
        call.reset()
        if resets is not None:
            resets(*args, **kwargs)

    # a hook, because it is called where users have replaced the forward, too
    call.ends.callback(module.register_forward_hook(call.check_reached).remove)
    ours: dict[str, Any] = {name: settling(getattr(module, name)) for name in CHANGING if hasattr(module, name)}
    ours |= {"forward": call, "__reduce_ex__": refuse_copy}
    if theirs is not None:
        ours["cache_context"] = wraps(theirs)(cache_context)
    if call.steps is not None or resets is not None:
        ours[RESETS] = reset
    ours |= _caching(call, ours)
    call.ends.callback(call.stand_aside, before.get("forward"))
    call.ends.callback(sharing.attach(module, ours))
    return call


def _caching(call: ShardedCall, ours: Mapping[str, Any]) -> dict[str, Any]:
    # diffusers' enable_cache and disable_cache, with our step cache in the place of a FirstBlockCache. ours: both, as
    # they settle deferred calls
    module, ranks = call.sharded.module, call.mesh.sequence.size
    methods = {name: ours[name] for name in ("enable_cache", "disable_cache") if name in ours}
    callers = None if in_its_place(module, ranks) is not None else call.steps
    call.ends.callback(put_back, module)

    def turned(name: str, *args: Any, **kwargs: Any) -> None:
        was_ours = in_its_place(module, ranks) is not None
        methods[name](*args, **kwargs)
        options = in_its_place(module, ranks)
        if options is not None:
            steps = StepCaching(options, module, call.state)
            take_off(module)
            call.leave_out(steps)
            call.state.say(f"FirstBlockCache decides by all tokens, as cache={str(options)!r}")
        elif was_ours:
            call.leave_out(callers)
        refresh(module)

    return {name: wraps(method)(partial(turned, name)) for name, method in methods.items()}


def in_its_place(module: nn.Module, ranks: int) -> StepCache | None:
    """Return the step cache that does what an enabled FirstBlockCache does, by the tokens of all ranks that share them.

    None where that stays as it is.
    """
    config = cache_config(module)
    if not isinstance(config, FirstBlockCacheConfig) or ranks == 1 or steps_of(module) is None:
        return None
    return StepCache(float(config.threshold), head=1, warmup=1, most=UNBOUNDED)


def take_off(module: nn.Module) -> None:
    """Take the hooks of FirstBlockCache off; the transformer's cache counts as enabled."""
    for part in module.modules():
        for name in [name for name, hook in hooks_on(part).items() if type(hook).__name__ in FIRST_BLOCK]:
            unregister(part, name)


def put_back(module: nn.Module) -> None:
    """Put them on again, if the cache is still enabled."""
    there = any(type(hook).__name__ in FIRST_BLOCK for part in module.modules() for hook in hooks_on(part).values())
    if isinstance(config := cache_config(module), FirstBlockCacheConfig) and not there:
        apply_first_block_cache(module, config)


def _sharded(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
    handle: Handle,
    cuts: Mapping[str, Cuts],
    native: bool,
    lossy: Lossy,
) -> list[ShardedModule]:
    # Moves a pipeline to this rank's device, and puts hooks on its transformers. After a ValueError, the same on all
    # ranks, all of it is freed; after other errors nothing is, because the other ranks may not take part.
    mesh, plan, sharded = handle.mesh, handle.plan, list[ShardedModule]()
    caches = dict[str, StepCache | None]()

    def check() -> None:
        for name, module in modules.items():
            refuse_backends(module)
            caches[name] = None if lossy.cache is not None else in_its_place(module, mesh.sequence.size)
            if caches[name] is not None:
                take_off(module)
            refuse(module, mesh, cuts[name].why_not(module), look(module))
            if mesh.sequence.size > 1:
                check_joined(module, cuts[name])

    try:
        mesh.on_all_ranks(check)
        mesh.on_all_ranks(lambda: _move(pipe_or_transformer, modules, mesh))
        calibrations, cache = lossy.settled(mesh, pipe_or_transformer, modules)
        for name, module in modules.items():
            known = calibrations.get(name)
            rounds = {} if known is None else known.attention
            bring(module)
            known = known if lossy.gemms else None
            sharded.append(ShardedModule(module, mesh, plan, cuts[name], native, known, rounds, caches[name] or cache))
        if is_lossy(plan.local.name) and not any(module.attentions_in_8_bits for module in sharded):
            kinds = ", ".join(type(module).__name__ for module in modules.values())
            raise ValueError(f'local="{plan.local.name}" computes no attention of {kinds}; leave it out')
    except ValueError:
        for module in sharded:
            module.release()
        for module in modules.values():
            put_back(module)
        handle.leave()
        raise
    return sharded


def _check_precision(
    precision: object, calibrate: object, native: bool, modules: Mapping[str, nn.Module], mesh: Mesh, attention: bool
) -> None:
    check_precision(precision)
    if precision is None and not attention:
        if calibrate is not None:
            raise ValueError('got calibrate= without precision="fp8" or local="fp8"')
        return
    if not (calibrate is None or callable(calibrate) or isinstance(calibrate, Mapping)):
        raise ValueError(f"got calibrate={shown(calibrate)}, expected a function that calls the model")
    if isinstance(calibrate, Mapping) and calibrate.keys() != modules.keys():
        raise ValueError(f"got calibrate= for {', '.join(calibrate)}, expected one for {', '.join(modules)}")
    if isinstance(calibrate, Mapping) and attention and not any(of.attention for of in calibrate.values()):
        raise ValueError('got calibrate= without numbers of attention, expected a function for local="fp8"')
    if precision is None:
        return
    if not native:
        raise ValueError(f'precision="{precision}" is computed by fused blocks, which native=False turns off')
    for module in modules.values():
        if (reason := why_not(module, mesh.device)) is not None:
            raise ValueError(f'precision="{precision}" cannot be used: {reason}')


def _move(pipe_or_transformer: Any, modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    if any(x.device != mesh.device for module in modules.values() for x in module.parameters()):
        pipe_or_transformer.to(mesh.device)


def _capture(sharded: ShardedModule) -> Capture | None:
    mesh = sharded.state.mesh
    if mesh.device.type != "cuda":
        return None
    reason = sharded.why_eager()
    if reason is not None:
        say(f"calls run without CUDA graphs, because {reason}", mesh)
    return CudaCapture() if reason is None else None


def _summary(call: ShardedCall) -> str:
    mesh, plan, by = call.mesh, call.state.plan, call.sharded.texts()["computation"]
    how = f"{plan.strategy.name} by {plan.transport.name}, " if mesh.sequence.size > 1 else ""
    local = f"attention {plan.local.name}{', exact mode' if plan.exact else ''}"
    return f"{type(call.sharded.module).__name__} runs on {mesh} ({by}; {how}{local})"
