# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests diffusers' caches between steps: what only extrapolates is right, what decides by its tokens is refused.

The truth is the unchanged transformer with the same cache in one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers.hooks
import pytest
import torch
from diffusers.hooks import text_kv_cache
from torch import Tensor

import seqpar
from tests.support.diffusers_tiny import WAN, Tiny, moved, wan
from tests.support.foreign import StayDouble, assert_right_or_refused, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.transformer.test_guidance import TOLERANCE, VISIBLE
from tests.transformer.test_pipelines import CASES

caches: Any = diffusers.hooks  # pyright sees no names that a package passes on
STEPS = 6
TINY = Tiny("WanTransformer3DModel", {**WAN, "num_layers": 3}, wan)
CLOCK = [0]  # the timestep of the step that runs, which some caches ask for
TIMES = {"current_timestep_callback": lambda: CLOCK[0]}
BLOCKS = {"spatial_attention_block_identifiers": ("blocks",)}


@dataclass(frozen=True)
class Cache:
    """A cache's config, what puts it onto a transformer without `enable_cache`, and why tokens cannot be split."""

    config: Callable[[], Any]
    apply: Callable[[Any, Any], object]
    refused: str | None = None


CACHES = {
    "TaylorSeer": Cache(
        lambda: caches.TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=2,
            cache_identifiers=[r"blocks\.\d+\.attn1"],
            taylor_factors_dtype=None,
        ),
        caches.apply_taylorseer_cache,
    ),
    "MagCache": Cache(
        lambda: caches.MagCacheConfig(
            threshold=1.0, retention_ratio=0.3, num_inference_steps=STEPS, mag_ratios=torch.linspace(1, 0.9, STEPS)
        ),
        caches.apply_mag_cache,
    ),
    "MagCache that calibrates": Cache(
        lambda: caches.MagCacheConfig(calibrate=True, num_inference_steps=STEPS),
        caches.apply_mag_cache,
        "MagCache measures its ratios on a rank's own tokens",
    ),
    "PyramidAttentionBroadcast": Cache(
        lambda: caches.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, **BLOCKS, **TIMES),
        caches.apply_pyramid_attention_broadcast,
    ),
    "FasterCache": Cache(
        lambda: caches.FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 850),
            attention_weight_callback=lambda module: 0.3,
            is_guidance_distilled=True,
            tensor_format="BCFHW",
            **BLOCKS,
            **TIMES,
        ),
        caches.apply_faster_cache,
    ),
    "FirstBlockCache": Cache(
        lambda: caches.FirstBlockCacheConfig(threshold=10.0),
        caches.apply_first_block_cache,
        "FirstBlockCache decides by a mean over a rank's own tokens",
    ),
    "SeaCache": Cache(
        lambda: caches.SeaCacheConfig(threshold=10.0), caches.apply_sea_cache, "SeaCache decides by a rank's own tokens"
    ),
    "TextKVCache": Cache(
        lambda: caches.TextKVCacheConfig(), text_kv_cache.apply_text_kv_cache, "TextKVCache finds a text by its address"
    ),
}
SHARED = "TextKVCache"  # refused on ranks with other branches, too


def latents_after(module: Any, device: torch.device | str) -> Tensor:
    """Return the latents after guided steps, as pipelines call a transformer."""
    given = moved(TINY.inputs(1), device)
    latents = given["hidden_states"]
    with torch.no_grad(), StayDouble():
        for number in range(STEPS):
            CLOCK[0], branches = 900 - 100 * number, []
            for seed, name in enumerate(("cond", "uncond")):
                texts = random(tuple(given["encoder_hidden_states"].shape), 20 + seed, device)
                arguments = {**given, "hidden_states": latents, "encoder_hidden_states": texts}
                with module.cache_context(name, step_index=number, num_inference_steps=STEPS):
                    branches.append(module(**arguments, return_dict=False)[0])
            latents = latents - 0.2 * (3 * branches[1] - 2 * branches[0])
    return latents


def put(name: str, module: Any, how: str) -> None:
    """Put a cache onto a transformer by its `enable_cache`, or by diffusers' function, which nothing announces."""
    one = CACHES[name]
    module.enable_cache(one.config()) if how == "enable_cache" else one.apply(module, one.config())


@cache
def truth(name: str | None, device: str) -> Tensor:
    """Return the latents of the unchanged transformer with a cache, or without."""
    module = TINY.build().to(device)
    if name is not None:
        put(name, module, "enable_cache")
    return latents_after(module, device).cpu()


def cached(rank: int, world: int, device: torch.device, name: str, cfg: int, how: str) -> Tensor | str:
    """Return this rank's latents, or the message of the ValueError.

    how: "enable_cache" and "apply" after `parallelize`, "before" it by `enable_cache`.
    """
    module = TINY.build().to(device)
    if how == "before":
        put(name, module, "enable_cache")
    try:
        seqpar.parallelize(module, make_mesh(device, cfg=cfg))
        if how != "before":
            put(name, module, how)
        in_double(module)
        return latents_after(module, device)
    except ValueError as error:
        return str(error)


# each cache by `enable_cache`; on ranks with other branches, and where it is refused, in one of the other ways, too
WAYS = [
    (world, cfg, name, how)
    for index, name in enumerate(CACHES)
    for world, cfg in ((2, 2), (3 - index % 2, 1))
    for how in ("enable_cache", ("apply", "before")[(index + cfg) % 2])
    if how == "enable_cache" or world == cfg or CACHES[name].refused
]


@pytest.mark.parametrize(("world", "cfg", "name", "how"), WAYS)
def test_a_cache_is_right_or_refused(ranks: Pool, world: int, cfg: int, name: str, how: str) -> None:
    refused = CACHES[name].refused if world > cfg or name == SHARED else None
    results = ranks.run(world, cached, name, cfg, how)
    assert_right_or_refused(results, truth(name, ranks.device), TOLERANCE, refused)


def test_negative_control_caches_change_the_latents(ranks: Pool) -> None:
    for name in CACHES.keys() - {"MagCache that calibrates", "SeaCache", SHARED}:  # these skip nothing in so few steps
        assert (truth(name, ranks.device) - truth(None, ranks.device)).abs().max() > VISIBLE, name


# cache-dit -----------------------------------------------------------------------------------------------------

DECIDES = "cache-dit decides by a rank's own tokens"
STEPS_OF_DIT = 6


def with_cache_dit(rank: int, world: int, device: torch.device, name: str, cfg: int, how: str) -> Tensor | str:
    """Return a pipeline's latents with the cache of cache-dit, or the message of the ValueError.

    how: whether it is enabled "before" or "after" `parallelize`, or "whole" without that.
    """
    cache_dit: Any = importlib.import_module("cache_dit")
    case, pipe = CASES[name], CASES[name].pipe().to(device)
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=0.9
    )
    try:
        if how != "after":
            cache_dit.enable_cache(pipe, cache_config=config)
        if how != "whole":
            seqpar.parallelize(pipe, make_mesh(device, cfg=cfg))
        if how == "after":
            cache_dit.enable_cache(pipe, cache_config=config)
        return case.pictures(pipe, rank, STEPS_OF_DIT)
    except ValueError as error:
        return str(error)
    finally:  # it changes the pipeline's class
        if how == "after":
            seqpar.release(pipe)
        cache_dit.disable_cache(pipe)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize(("world", "cfg"), [(1, 1), (2, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_cache_dit_is_right_or_refused(ranks: Pool, name: str, world: int, cfg: int, how: str) -> None:
    """With FLUX.1 it sets a forward of its own, which does not call ours."""
    pytest.importorskip("cache_dit")
    late = "was replaced after parallelize by CachedAdapter" if name == "flux" else "was enabled after parallelize"
    refused = late if how == "after" else DECIDES if world > cfg else None
    results = ranks.run(world, with_cache_dit, name, cfg, how)
    (true,) = ranks.run(1, with_cache_dit, name, 1, "whole")
    plain = CASES[name].pictures(CASES[name].pipe().to(ranks.device), steps=STEPS_OF_DIT).cpu()
    assert (true - plain).abs().max() > VISIBLE
    # latents that are not decoded stay a rank's own
    assert_right_or_refused(results[: 1 if refused is None else world], true, 1e-12, refused)
