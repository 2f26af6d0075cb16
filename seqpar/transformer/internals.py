"""Private names of torch, diffusers, accelerate and peft that the engine reads, where there is no public one.

Tested with torch 2.11, torch 2.13, torch 2.14, torch 2.15, diffusers 0.42, accelerate 1.2, accelerate 1.15 and
peft 0.21.
tests/transformer/test_internals.py has a test for each name, which says what broke with another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled as is_group_offloaded
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import nn
from torch.utils.hooks import RemovableHandle

from seqpar.families._modular import is_modular, loops_of

__all__ = ["is_group_offloaded"]

# torch ---------------------------------------------------------------------------------------------------------

COMPILED = "_torchdynamo_orig_callable"  # an attribute of the functions that torch.compile returns


def is_compiled(module: nn.Module, forward: Any) -> bool:
    """Return whether torch has compiled a module: in place, as an object around it, or the forward set on it."""
    in_place = module._compiled_call_impl is not None
    return in_place or type(module).__name__ == "OptimizedModule" or hasattr(forward, COMPILED)


def torch_hooks(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return the forward hooks that torch has registered on a module, before and after its forward."""
    return module._forward_pre_hooks, module._forward_hooks


def registered_hooks() -> int:
    """Return a number that grows with every hook that torch registers anywhere."""
    return RemovableHandle.next_id


# accelerate ----------------------------------------------------------------------------------------------------

ACCELERATE_HOOK, BEFORE_ACCELERATE = "_hf_hook", "_old_forward"  # attributes of a module with a hook of accelerate


def accelerate_hook(module: nn.Module) -> Any:
    """Return accelerate's hook on a module, or None."""
    return vars(module).get(ACCELERATE_HOOK)


def moves_weights(hook: Any, module: nn.Module) -> bool:
    """Return whether a hook of accelerate may do more than bring inputs to the device of a module's weights."""
    if type(hook).__name__ != "AlignDevicesHook" or hook.offload:
        return True
    if hook.execution_device is None:
        return False
    to, weight = torch.device(hook.execution_device), next(module.parameters(), None)
    return weight is not None and (weight.device.type != to.type or to.index not in (None, weight.device.index))


# peft ----------------------------------------------------------------------------------------------------------


def adapters_of(layer: Any) -> Any:
    """Return the names of all adapters that a layer of peft holds."""
    return layer._get_available_adapters()


# diffusers -----------------------------------------------------------------------------------------------------

REGISTRY = "_diffusers_hook"  # the attribute of a module that holds its hooks


def hooks_on(module: nn.Module) -> dict[str, ModelHook]:
    """Return the hooks of diffusers on a module by their names, the innermost first."""
    registry: Any = vars(module).get(REGISTRY)
    return {} if registry is None else registry.hooks


def cache_config(module: nn.Module) -> Any:
    """Return the config of the cache that `enable_cache` has put on a transformer, or None."""
    return getattr(module, "_cache_config", None)


@contextmanager
def without_bar(pipe: Any) -> Iterator[None]:
    """Show no progress bar of a pipeline's loop."""
    owners = [*loops_of(pipe)] if is_modular(pipe) else [pipe]
    before: list[dict[str, Any]] = [vars(owner).get("_progress_bar_config", {}) for owner in owners]
    try:
        for owner, options in zip(owners, before, strict=True):
            owner.set_progress_bar_config(**options | {"disable": True})
        yield
    finally:
        for owner, options in zip(owners, before, strict=True):
            owner.set_progress_bar_config(**options)


def skips_scores(module: nn.Module) -> bool:
    """Return whether diffusers lets a module's attention return its values (`LayerSkipConfig`, for PAG).

    Its hook replaces torch's attention while the module runs, around our own replacement, which hides it.
    """
    return any(getattr(hook, "skip_attention_scores", False) for hook in hooks_on(module).values())


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module's forward is the outermost hook of diffusers, and not one that was put in its place."""
    forward: Any = vars(module).get("forward")
    return getattr(getattr(forward, "func", None), "__module__", None) == HookRegistry.__module__


def is_outermost(module: nn.Module, prefix: str) -> bool:
    """Return whether a hook whose name begins so is around all others."""
    return next(reversed(hooks_on(module)), "").startswith(prefix)


def register_innermost(module: nn.Module, hook: Any, name: str) -> None:
    """Register a hook inside of all others, unless a user's forward is around them; `hook.compute` replaces forward.

    compute gets the forward inside of the hook first, then the module and the arguments.
    """
    registry: Any = HookRegistry.check_if_exists_or_initialize(module)
    outer, inside = module.forward, is_hooked(module)
    registry.register_hook(hook, name)
    if inside:
        first, call = registry._fn_refs[0], module.forward
        calls = "forward" if first.original_forward is None else "original_forward"
        hook.fn_ref.forward, module.forward = getattr(first, calls), outer
        setattr(first, calls, call)
        for order in (registry._hook_order, registry._fn_refs):
            order.insert(0, order.pop())
        registry.hooks = {name: registry.hooks.pop(name), **registry.hooks}
    own = hook.fn_ref.original_forward = hook.fn_ref.forward
    hook.fn_ref.forward = partial(hook.compute, own, module)  # holds `own`: a user's forward may call an old one


def unregister(module: Any, name: str) -> None:
    """Remove a hook, but no forward that a user has put in the place of all hooks.

    diffusers forgets what the next hook around it calls, if that has its own `new_forward`.
    """
    registry = HookRegistry.check_if_exists_or_initialize(module)
    replaced = None if is_hooked(module) else vars(module).get("forward")
    names = [*registry.hooks, ""]
    around: Any = registry.hooks.get(names[names.index(name) + 1]) if name in registry.hooks else None
    forward: Callable[..., Any] | None = around.fn_ref.forward if around is not None else None
    registry.remove_hook(name, recurse=False)
    if around is not None and around.fn_ref.original_forward is not None:
        around.fn_ref.original_forward, around.fn_ref.forward = around.fn_ref.forward, forward
    if replaced is not None:
        module.forward = replaced
