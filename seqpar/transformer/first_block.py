"""diffusers' FirstBlockCache where ranks share the tokens: our step cache decides in its place, by all tokens.

It is diffusers' own `enable_cache` that puts it on, before or after `parallelize`, and `disable_cache` that ends it.
"""

from __future__ import annotations

from diffusers.hooks.first_block_cache import FirstBlockCacheConfig, apply_first_block_cache
from torch import nn

from seqpar.families._find import steps_of
from seqpar.transformer.internals import cache_config, hooks_on, unregister
from seqpar.transformer.step_cache import StepCache

HOOKS = ("FBCHeadBlockHook", "FBCBlockHook")
MOST = 1_000_000  # steps in a row: it has no bound


def in_its_place(module: nn.Module, ranks: int) -> StepCache | None:
    """Return the step cache that does what an enabled FirstBlockCache does; None where that stays as it is.

    ranks: those that share the tokens.
    """
    config = cache_config(module)
    if not isinstance(config, FirstBlockCacheConfig) or ranks == 1 or steps_of(module) is None:
        return None
    return StepCache(float(config.threshold), head=1, warmup=1, most=MOST)


def take_off(module: nn.Module) -> None:
    """Take diffusers' hooks off; the transformer's cache counts as enabled."""
    for part in module.modules():
        for name in [name for name, hook in hooks_on(part).items() if type(hook).__name__ in HOOKS]:
            unregister(part, name)


def put_back(module: nn.Module) -> None:
    """Put diffusers' hooks on again, if the cache is still enabled."""
    there = any(type(hook).__name__ in HOOKS for part in module.modules() for hook in hooks_on(part).values())
    if isinstance(config := cache_config(module), FirstBlockCacheConfig) and not there:
        apply_first_block_cache(module, config)
