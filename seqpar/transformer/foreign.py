"""Third-party code on a transformer's modules: hooks, replaced forwards, processors, quantised layers.

Such code may read other batch rows or other tokens, and may keep state between calls. Rows and calls can stay together:
every rank then computes whole batches, at the time of the call. Tokens cannot, where ranks split them: code that
surely needs all tokens is refused, and code that may need them is printed, because this cannot be seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import nn

from seqpar.families._cuts import block_lists
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.internals import (
    BEFORE_ACCELERATE,
    accelerate_hook,
    hooks_on,
    is_compiled,
    is_group_offloaded,
    moves_weights,
    torch_hooks,
)

# where classes and functions are defined that neither read nor keep anything: they convert or parametrise weights
PASSIVE = ("seqpar.", "peft.", "torch.nn.utils.", "diffusers.hooks.layerwise_casting")
# where hooks are defined that compute each token by itself: they skip layers, or extrapolate from earlier steps
BY_TOKEN = (
    "diffusers.hooks.faster_cache",
    "diffusers.hooks.layer_skip",
    "diffusers.hooks.mag_cache",
    "diffusers.hooks.pyramid_attention_broadcast",
    "diffusers.hooks.taylorseer_cache",
)
# hooks of diffusers that read the tokens of a rank as if they were all tokens
READS_ALL_TOKENS = {
    "FBCHeadBlockHook": "FirstBlockCache decides by a mean over a rank's own tokens what to compute again",
    "SeaCacheRootHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SeaCacheLeaderBlockHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SmoothedEnergyGuidanceHook": "smoothed energy guidance blurs the queries of the whole picture",
}
LIBRARIES = ("diffusers", "torch", "accelerate", "peft", "transformers", "seqpar")  # whose blocks are no code of users
CACHE_DIT = "cache_dit."  # where cache-dit's forwards and blocks are defined, which decide by a mean over tokens
DECIDES = "cache-dit decides by a rank's own tokens what to compute again"
OWN_FORWARD = (
    "its forward {} may decide by one rank's tokens; a wrapper can be set after parallelize, where it sees all tokens, "
    "and enable_cache() has caches of diffusers"
)
UNSHARED = "diffusers' TextKVCache finds a text by its address, which differs in each call there; call disable_cache()"
DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")
CALL = "_seqpar_call"  # the attribute of a parallelized transformer that holds its call
SHOWN, WIDTH = 3, 60  # things that are named in a line, and characters of each


@dataclass(frozen=True)
class Addition:
    """Third-party code. path: of the submodule, "" for the transformer itself. kind: what it is, with its name."""

    path: str
    kind: str
    what: Any

    def __str__(self) -> str:
        return f"{self.kind} is on {self.path or 'the transformer'}"


@dataclass(frozen=True)
class ForeignCode:
    """What `look` sees: hooks and replaced forwards, and the reasons (or None) why rows cannot be computed apart.

    unsplit: why tokens cannot be split. unshared: why a call cannot be computed on several ranks. named: what may need
    all tokens, as a text of limited length that is equal on all ranks; "" for nothing.
    """

    hooks: tuple[Addition, ...] = ()
    coupled: str | None = None
    unsplit: str | None = None
    unshared: str | None = None
    named: str = ""


def look(module: nn.Module) -> ForeignCode:
    """Return third-party code on a transformer and its submodules; this takes milliseconds."""
    hooks, processors, quantised = list[Addition](), list[Addition](), list[Addition]()
    patched = {kind for kind in set(map(type, module.modules())) if is_patched(kind, "forward")}
    home, lists = type(module).__module__.partition(".")[0], block_lists(module)
    members = {id(child) for _, blocks in lists for child in blocks.children()}
    for path, part in module.named_modules():
        hooks += _hooks_on(path, part, type(part) in patched)
        if id(part) in members and type(part).__module__.partition(".")[0] not in (*LIBRARIES, home):
            hooks.append(Addition(path, f"class {type(part).__name__}", part))
        if (processor := getattr(part, "processor", None)) is not None:
            name = type(processor).__name__
            known = _home(processor).startswith(("diffusers.models.", "seqpar.")) and "PAG" not in name
            if not known or is_patched(type(processor), "__call__"):  # it may read other rows
                processors.append(Addition(path, f"processor {name}", processor))
        packed = getattr(getattr(part, "_packed_params", None), "dtype", None)
        in_blocks = type(part).__module__.startswith(DYNAMIC) and ("blocks" in path or "layers" in path)
        if in_blocks and packed != torch.float16:  # with one scale for all rows and tokens of a call
            quantised.append(Addition(path, f"dynamically quantised {type(part).__name__}", part))
    first = next(iter((*hooks, *processors, *quantised)), None)
    coupled = None if first is None else f"{first} and may read other rows or keep something between calls"
    reasons = [*map(_reads_all_tokens, hooks), *(f"{layer}, with one scale for all tokens" for layer in quantised)]
    unsplit = next((reason for reason in reasons if reason is not None), None)
    unshared = next((UNSHARED for hook in hooks if type(hook.what).__name__ == "TextKVCacheTransformerHook"), None)
    may_need_all = [x for x in (*hooks, *processors) if x.path and not _home(x.what).startswith(BY_TOKEN)]
    return ForeignCode(tuple(hooks), coupled, unsplit, unshared, _named(may_need_all))


def refuse_compiled(module: nn.Module) -> None:
    """Raise ValueError for a transformer that is compiled, as a whole or in part."""
    for path, part in module.named_modules():
        if is_compiled(part, unhooked(_set_on(part))):
            raise ValueError(
                f"Compiled modules are not supported: {path or 'the transformer'} is compiled. Load the model without "
                f"torch.compile; fused blocks and CUDA graphs are faster"
            )


def refuse(module: nn.Module, mesh: Mesh, reason: str | None, foreign: ForeignCode) -> None:
    """Raise ValueError for what computes something else on several ranks. reason: why the cuts do not fit, or None."""
    name, ranks = type(module).__name__, mesh.sequence.size
    if foreign.unshared is not None and mesh.world.size > 1:
        raise ValueError(f"{name} cannot run on several ranks: {foreign.unshared}")
    if ranks > 1 and reason is not None:
        raise ValueError(f"{name} cannot be split over {ranks} ranks: {reason}. Use cfg= or data= ranks")
    if ranks > 1 and foreign.unsplit is not None:
        raise ValueError(
            f"{name} cannot be split over {ranks} ranks: {foreign.unsplit}. Remove it (disable_cache() for a cache), "
            f"or use cfg= or data= ranks"
        )


def refuse_late(module: nn.Module) -> None:
    """Raise ValueError for blocks of cache-dit in a parallelized transformer.

    They hold the transformer itself, so that nothing else may walk through its modules. This takes microseconds.
    """
    first = (next(iter(child), None) for child in module.children() if isinstance(child, nn.ModuleList))
    if any(type(block).__module__.startswith(CACHE_DIT) for block in first):
        raise ValueError(
            f"{type(module).__name__} has a cache of cache-dit that was enabled after parallelize. Call "
            f"seqpar.release, enable the cache, then parallelize again; several ranks must be cfg= or data= ranks, "
            f"because {DECIDES}"
        )


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a transformer's forward without that of `parallelize`."""
    forward = _set_on(module)
    return type(module).forward.__get__(module) if forward is None else forward


def _hooks_on(path: str, part: nn.Module, patched: bool) -> Iterator[Addition]:
    # Hooks, and a forward that is not of the module's class. patched: whether that of its class is another package's.
    # Hooks of torch on the transformer itself are left out: they run around a call, on all tokens.
    others = (hook for hook in hooks_on(part).values() if not _home(hook).startswith(PASSIVE))
    yield from (Addition(path, f"hook {type(hook).__name__}", hook) for hook in others)
    hooks = (hook for hooks in torch_hooks(part) for hook in hooks.values()) if path else ()
    yield from (Addition(path, f"hook {name_of(hook)}", hook) for hook in hooks if not _home(hook).startswith(PASSIVE))
    accelerates = accelerate_hook(part)
    forward = unhooked(_set_on(part) if path or accelerates is None else vars(part).get(BEFORE_ACCELERATE))
    plain = forward is None or getattr(forward, "__func__", None) is type(part).forward
    if path and accelerates is not None and moves_weights(accelerates, part):
        yield Addition(path, f"accelerate's hook {type(accelerates).__name__}", accelerates)
    elif not plain and not (_home(forward) if path else _home_of_code(forward)).startswith(PASSIVE):
        yield Addition(path, f"forward {name_of(forward)}", forward)
    elif patched:
        yield Addition(path, f"class with the forward {name_of(type(part).forward)}", type(part).forward)


def is_offloaded(module: nn.Module, inside: bool = True) -> bool:
    """Return whether hooks of accelerate or diffusers move a transformer's weights between host and GPU.

    inside: whether to search submodules, too.
    """
    if inside and is_group_offloaded(module):
        return True
    if accelerate_hook(module) is None:
        return False
    parts = module.modules() if inside else (module,)
    return any((hook := accelerate_hook(part)) is not None and moves_weights(hook, part) for part in parts)


def is_patched(kind: type, method: str) -> bool:
    # put onto a class by another package than the class's: a wrapper copies the names of what it wraps, but not the
    # globals
    code: Any = getattr(kind, method)
    home = str(getattr(code, "__globals__", {}).get("__name__", kind.__module__))
    owners = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return home.partition(".")[0] not in owners | {"torch", "diffusers", "accelerate", "peft", "seqpar"}


def _set_on(module: nn.Module) -> Any:
    # of a parallelized transformer, what it had before
    call = vars(module).get(CALL)
    return vars(module).get("forward") if call is None else call.before.get("forward")


def _reads_all_tokens(addition: Addition) -> str | None:
    hook, kind = addition.what, type(addition.what).__name__
    if not addition.path and not addition.kind.startswith("hook "):
        theirs = _home_of_code(hook).startswith(CACHE_DIT)
        return DECIDES if theirs else OWN_FORWARD.format(name_of(hook))
    if kind in READS_ALL_TOKENS:
        return READS_ALL_TOKENS[kind]
    if kind == "MagCacheHeadHook" and hook.config.calibrate:
        return "MagCache measures its ratios on a rank's own tokens while it calibrates"
    if kind.endswith("SkipHook") and not isclose(getattr(hook, "dropout", 1.0), 1.0):
        return f"{addition} and draws random numbers for a rank's own tokens"
    return None


def _named(additions: Iterable[Addition]) -> str:
    paths: dict[str, list[str]] = {}
    for addition in additions:
        paths.setdefault(addition.kind[:WIDTH], []).append(addition.path)
    more = {kind: f" and {len(where) - 1} more" if len(where) > 1 else "" for kind, where in paths.items()}
    shown = [f"{kind} on {where[0]}{more[kind]}" for kind, where in list(paths.items())[:SHOWN]]
    return ", ".join([*shown, *([f"{len(paths) - SHOWN} others"] if len(paths) > SHOWN else [])])


def home_of_forward(module: nn.Module) -> str:
    """Return the top-level package of the code that a module's forward runs, inside of partials and bound methods."""
    forward: Any = module.forward
    while isinstance(inner := unhooked(forward), partial) or inner is not forward:
        forward = inner.func if isinstance(inner, partial) else inner
    code = getattr(forward, "__func__", forward)  # `functools.wraps` changes its `__module__`, and not its globals
    return str(getattr(code, "__globals__", {}).get("__name__", type(module).__module__)).partition(".")[0]


def unhooked(forward: Any) -> Any:
    """Return the forward inside of those that hooks of diffusers and accelerate have put around it."""
    while isinstance(forward, partial) and _home(forward.func) in ("diffusers.hooks.hooks", "accelerate.hooks"):
        forward = forward.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    return forward


def _home(what: Any) -> str:
    return f"{getattr(what, '__module__', None)}"


def _home_of_code(function: Any) -> str:
    # `functools.wraps` does not change it
    code: Any = getattr(function, "__func__", function)
    return f"{getattr(code, '__globals__', {}).get('__name__', _home(function))}"


def name_of(what: Any) -> str:
    """Return the name of a function or class; of a wrapper its own besides the one that `functools.wraps` copies."""
    while isinstance(what, partial):
        what = what.func
    name, code = getattr(what, "__qualname__", type(what).__name__), getattr(what, "__code__", None)
    own = getattr(code, "co_name", None)
    return name if own in (None, getattr(what, "__name__", None)) else f"{own} around {name}"
