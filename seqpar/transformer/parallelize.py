"""`parallelize`: makes a diffusers pipeline or transformer compute on all GPUs, in place; `release` undoes it.

`refresh` lets the next call look at everything again that a user may have changed.

Every rank builds the same pipeline and makes the same calls with it. The transformer keeps its class, weights, names,
config and adapters; only its `forward` is replaced (`seqpar.transformer.call`). All ranks end with rank 0's pictures.
When it wins: for every pipeline of diffusers with a transformer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import nn

from seqpar.families._cuts import Cuts, check_joined
from seqpar.graphs.graphs import Capture, CudaCapture
from seqpar.loading.respacing import pass_variances
from seqpar.loading.transformers import transformers_of
from seqpar.mesh.inputs import agree
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan
from seqpar.planner.search import Wish
from seqpar.transformer.body import Body
from seqpar.transformer.call import Call
from seqpar.transformer.changes import REFRESHES
from seqpar.transformer.foreign import BEFORE, look, refuse
from seqpar.transformer.lease import Before, Lease, call_of, leased
from seqpar.transformer.seats import refuse_backends
from seqpar.transformer.subjects import all_checked, choices, planned, takes_variances
from seqpar.vae import pipeline as sharing
from seqpar.vae.pipeline import Wished

PipeT = TypeVar("PipeT")
Arguments = ParamSpec("Arguments")
# methods that change what a transformer computes: a call that was promised is computed before them
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


def _plan_is_cuts(function: Callable[Arguments, PipeT]) -> Callable[Arguments, PipeT]:
    """Let a function take its argument `cuts` by its former name, `plan`, with a warning."""

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> PipeT:
        if "plan" in kwargs:
            warnings.warn(
                "got plan= for parallelize, expected cuts=: a plan is what the planner makes; the name plan= will go",
                FutureWarning,
                stacklevel=2,
            )
            kwargs["cuts"] = kwargs.pop("plan")
        return function(*args, **kwargs)

    return called


@_plan_is_cuts
def parallelize(
    pipe_or_transformer: PipeT,
    mesh: Mesh | str | None = None,
    *,
    strategy: str = "auto",
    local: str = "auto",
    transport: str = "auto",
    native: bool = True,
    cuts: Cuts | Mapping[str, Any] | None = None,
    vae: Wished = "auto",
    cfg: bool = True,
) -> PipeT:
    """Make a diffusers pipeline or transformer compute on the ranks of a mesh, in place, and return it.

    mesh, strategy, local, transport: the caller's choices; the planner decides once on those that are None or "auto".
    mesh may be what `--mesh` takes, as "cfg=2,ulysses=2"; "throughput" plans for a picture a rank in each call.
    native: whether blocks of this package may compute on the transformer's weights, which is faster. cuts: where the
    tokens of a transformer are split, as `seqpar.families.Cuts` or diffusers' `_cp_plan`; None takes what
    is known of its class. vae: whether the VAE computes by strips; where it cannot, True is a ValueError and "auto"
    prints why; "tiled" is diffusers' tiling, which has seams. cfg: whether ranks may compute both branches of guidance
    at once. Every rank uses rank 0's inputs; `release` puts everything back. Raises ValueError alike on all ranks.
    """
    names: Any = {"strategy": strategy, "local": local, "transport": transport}
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    own, wish = ranks.together(lambda: choices(mesh, Wish(**names), native, cfg))
    modules = ranks.together(lambda: transformers_of(pipe_or_transformer))
    where = ranks.together(lambda: all_checked(pipe_or_transformer, modules, cuts, vae))
    axes = mesh if own is None else own.sizes
    agree(ranks, {"mesh": axes, **names, "native": native, "vae": vae, "cfg": cfg})
    plan = planned(pipe_or_transformer, modules, own, wish, native, cfg)
    lease = leased(plan, own)
    bodies = _bodies(pipe_or_transformer, modules, lease, plan, where, native)
    _install_all(pipe_or_transformer, modules, bodies, lease, plan, where)
    _share_vae(pipe_or_transformer, modules, lease, plan, vae)
    return pipe_or_transformer


def refresh(pipe_or_transformer: Any) -> None:
    """Let the next call look at everything again, also at what calls do not compare: weights, buffers, attributes.

    Every rank must call this at the same time, at any time between two calls; it changes no result. The next call of a
    kind is captured again. Raises ValueError for what is not parallelized.
    """
    for module, call in _calls_of(pipe_or_transformer):
        call.settle()
        vars(module)[REFRESHES] = vars(module).get(REFRESHES, 0) + 1


def release(pipe_or_transformer: Any) -> None:
    """Undo `parallelize`: free graphs and exchanges and restore the transformer, on all ranks at the same time."""
    calls = _calls_of(pipe_or_transformer)
    for _, call in calls:
        call.check_delivered()
    for module, call in calls:
        call.release()
        before: Before = vars(module).pop(BEFORE)
        vars(module).pop(REFRESHES, None)
        before.ends.close()
        before.lease.leave()


def _calls_of(pipe_or_transformer: Any) -> list[tuple[nn.Module, Call]]:
    """Return the transformers with their calls; ValueError if one is not parallelized."""
    calls = [(module, call_of(module)) for module in transformers_of(pipe_or_transformer).values()]
    for module, call in calls:
        if call is None:
            raise ValueError(
                f"got {type(module).__name__} that is not parallelized, expected the result of parallelize"
            )
    return [(module, call) for module, call in calls if call is not None]


def _install_all(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
    bodies: Mapping[str, Body],
    lease: Lease,
    plan: Plan,
    cuts: Mapping[str, Cuts],
) -> None:
    """Put calls in place of the forwards of all transformers, after everything that can fail; rank 0 says so."""
    mesh = lease.mesh
    calls = {
        name: Call(modules[name], mesh, body, _capture(mesh, body), cuts[name], plan.exact)
        for name, body in bodies.items()
    }
    for name, call in calls.items():
        before = vars(modules[name])[BEFORE] = lease.join(modules[name], INSTALLED, call)
        install(modules[name], call, before)
        if mesh.is_main:
            print(_summary(modules[name], call.body, mesh, plan), flush=True)
    if takes_variances(pipe_or_transformer):
        lease.ends.callback(pass_variances(pipe_or_transformer))


def _share_vae(
    pipe_or_transformer: Any, modules: Mapping[str, nn.Module], lease: Lease, plan: Plan, wish: Wished
) -> None:
    """Let a pipeline's VAE take rank 0's input and, if that is wished, compute on all ranks until the release."""

    def check() -> None:
        calls = [call for module in modules.values() if (call := call_of(module)) is not None]
        for call in calls:
            call.check_delivered()
        for call in calls[:1]:
            call.pass_boundary()

    lease.ends.callback(sharing.share_vae(pipe_or_transformer, lease.mesh, plan.transport.name, wish, check))
    if lease.mesh.world.size > 1 and hasattr(pipe_or_transformer, "vae"):
        same = sharing.same_vae(pipe_or_transformer)
        for module in modules.values():
            if (call := call_of(module)) is not None:
                call.check = same


def install(module: nn.Module, call: Call, before: Before) -> None:
    """Put a call in place of a transformer's forward, follow labels and changes, and refuse copies.

    before: what it was before; its `ends` take all off again, except for what users have put around it.
    """

    def refuse_copy(protocol: object) -> NoReturn:
        raise ValueError(
            "got a parallelized transformer to copy or pickle, expected a plain one; call seqpar.release first"
        )

    theirs: Any = getattr(module, "cache_context", None)

    def cache_context(name: str, *args: Any, **kwargs: Any) -> Any:
        return call.labelled(name, theirs(name, *args, **kwargs))

    # a hook, because it is called where users have replaced the forward, too
    before.ends.callback(module.register_forward_hook(call.check_reached).remove)
    ours: dict[str, Any] = {name: _settling(call, getattr(module, name)) for name in CHANGING if hasattr(module, name)}
    ours |= {"forward": call, "__reduce_ex__": refuse_copy}
    if theirs is not None:
        ours["cache_context"] = wraps(theirs)(cache_context)
    vars(module).update(ours)
    before.ends.callback(_uninstall, module, call, ours, before.attributes)


def _uninstall(module: nn.Module, call: Call, ours: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Put attributes back as they were before; what users have put around ours since then stays."""
    named = vars(module)
    for name, mine in ours.items():
        if named.get(name) is mine:
            del named[name]
            named |= {name: before[name]} if name in before else {}
    call.stand_aside(before.get("forward"))


def _settling(call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a transformer that first computes what was promised, with the module as it was then."""

    @wraps(method)
    def settled(*args: Any, **kwargs: Any) -> Any:
        call.settle()
        return method(*args, **kwargs)

    return settled


def _move(pipe_or_transformer: Any, modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Move a pipeline to this rank's device, if a transformer is elsewhere."""
    if any(x.device != mesh.device for module in modules.values() for x in module.parameters()):
        pipe_or_transformer.to(mesh.device)


def _bodies(
    pipe_or_transformer: Any,
    modules: Mapping[str, nn.Module],
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
        for name, module in modules.items():
            mesh.together(lambda module=module, name=name: _checked(module, mesh, cuts[name]))
        mesh.together(lambda: _move(pipe_or_transformer, modules, mesh))
        for name, module in modules.items():
            bodies[name] = Body(module, mesh, plan, cuts[name], native)
    except ValueError:
        for body in bodies.values():
            body.release()
        lease.leave()
        raise
    return bodies


def _checked(module: nn.Module, mesh: Mesh, cuts: Cuts) -> None:
    """Raise ValueError if a transformer's modules, as they are now, cannot compute on these ranks."""
    refuse_backends(module)
    refuse(module, mesh, cuts.why_not(module), look(module))
    if mesh.sequence.size > 1:
        check_joined(module, cuts)


def _capture(mesh: Mesh, body: Body) -> Capture | None:
    """Return what captures calls on a GPU; None, with the reason printed, where the body's calls cannot be captured."""
    if mesh.device.type != "cuda":
        return None
    reason = body.why_eager()
    if reason is not None and mesh.is_main:
        print(f"seqpar: calls run without CUDA graphs, because {reason}", flush=True)
    return CudaCapture() if reason is None else None


def _summary(module: nn.Module, body: Body, mesh: Mesh, plan: Plan) -> str:
    by = body.told()["computation"]
    how = f"{plan.strategy.name} by {plan.transport.name}, " if mesh.sequence.size > 1 else ""
    local = f"attention {plan.local.name}{', exact mode' if plan.exact else ''}"
    return f"seqpar: {type(module).__name__} runs on {mesh} ({by}; {how}{local})"
