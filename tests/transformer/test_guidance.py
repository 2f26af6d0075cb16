# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests guidance and caches that change a transformer between the calls of a step, or couple the rows of a batch.

The truth is the unchanged transformer or pipeline in one process. Each case runs with the cfg axis, which computes two
branches at the same time where nothing forbids it, and with ranks that share the tokens. A case that cannot be right
there, because it decides by its tokens, is refused before the first step ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers.hooks
import pytest
import torch
from diffusers.guiders.auto_guidance import AutoGuidance
from diffusers.guiders.skip_layer_guidance import SkipLayerGuidance
from diffusers.hooks import text_kv_cache
from diffusers.hooks.layer_skip import LayerSkipConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

import seqpar
from tests.support.diffusers_tiny import MODELS, Tiny, moved
from tests.support.foreign import StayDouble, assert_right_or_refused, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.support.sharded import VISIBLE
from tests.transformer.test_lora import add
from tests.transformer.test_pipelines import CASES as PIPELINES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # peft warns of what is tested here
TOLERANCE = 1e-10
MORE = [(1, 1, "skipped layers"), (3, 1, "skipped layers"), (4, 2, "plain")]
TINY = MODELS["wan"].having(num_layers=3)
Call = Callable[..., Tensor]
Step = Callable[[Any, Call, int], Tensor]


def both(module: Any, call: Call, number: int) -> Tensor:
    """Return plain guidance."""
    first = call(0)
    return 3 * call(1) - 2 * first


@dataclass(frozen=True)
class Guided:
    """A loop of guided steps. before: changes the transformer; step: returns a step's prediction of all its calls.

    early: whether it is changed before `parallelize`. refused: the words of the error with which ranks that share
    tokens refuse it; None where they are right, too. always: whether ranks with other branches refuse it as well.
    """

    step: Step = both
    before: Callable[[Any], object] = lambda module: None
    rows: int = 1
    refused: str | None = None
    model: Tiny = TINY
    early: bool = False
    always: bool = False
    steps: int = 3  # the first shows pairs of calls, which the next ones promise; the last may be another

    def run(self, module: Any, device: torch.device | str = "cpu") -> Tensor:
        torch.manual_seed(0)
        given = moved(self.model.inputs(self.rows), device)
        latents = given["hidden_states"]
        with torch.no_grad(), StayDouble():
            for CLOCK["step"] in range(self.steps):

                def call(text: int, latents: Tensor = latents) -> Tensor:
                    texts = random(tuple(given["encoder_hidden_states"].shape), 20 + text, device)
                    arguments = {**given, "hidden_states": latents, "encoder_hidden_states": texts}
                    arguments["timestep"] = given["timestep"] - CLOCK["step"]
                    with self.labelled(module, text):
                        return module(**arguments, return_dict=False)[0][:, : latents.shape[1]]  # without variances

                latents = latents - 0.2 * self.step(module, call, CLOCK["step"])
        return latents

    def labelled(self, module: Any, text: int) -> AbstractContextManager[Any]:
        """Name a call as diffusers' pipelines do; PixArt's transformers take no names."""
        if not hasattr(module, "cache_context"):
            return nullcontext()
        return module.cache_context(
            "uncond" if text else "cond", step_index=CLOCK["step"], num_inference_steps=self.steps
        )


CLOCK = {"step": 0}  # the step that runs, for whose time some caches ask


def by_guider(make: Callable[[], Any]) -> Step:
    kept: list[Any] = []

    def step(module: Any, call: Call, number: int) -> Tensor:
        if not number:
            kept[:] = [make()]
        guider = kept[0]
        guider.set_state(step=number, num_inference_steps=3, timestep=torch.tensor(number))
        batches = guider.prepare_inputs({"text": (torch.tensor(0), torch.tensor(1))})
        for batch in batches:
            guider.prepare_models(module)
            batch.noise_pred = call(int(batch.text))
            guider.cleanup_models(module)
        return guider(batches).pred

    return step


def skipping(guidance_scale: float = 7.5, **layers: Any) -> Any:
    config = LayerSkipConfig([1], **layers)
    return SkipLayerGuidance(guidance_scale, skip_layer_guidance_stop=1.0, skip_layer_config=config)


def worse(dropout: float) -> Any:
    return AutoGuidance(auto_guidance_config=LayerSkipConfig([1], dropout=dropout))


def with_adapters(module: Any) -> None:
    add(module, "a", seed=1)
    add(module, "b", seed=2)


def by_branch(module: Any, call: Call, number: int) -> Tensor:
    """Return guidance between two branches, each with an adapter of its own."""
    module.set_adapters(["a"], [1.0])
    first = call(0)
    module.set_adapters(["b"], [0.7])
    return 2 * first - call(1)


def later(module: Any, call: Call, number: int) -> Tensor:
    """Return guidance with an adapter that is switched only in the last step, before which pairs were seen."""
    module.set_adapters(["a"], [1.0])
    first = call(0)
    if number == 2:
        module.set_adapters(["b"], [0.7])
    return 2 * first - call(1)


class Shared(WanAttnProcessor):
    """Attention to a mean with the batch's first row, as methods for one style in all pictures have it."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, (hidden_states + hidden_states[:1]) / 2, *args, **kwargs)


def hook_adapters(module: Any) -> None:
    add(module, "a", seed=1)
    module.blocks[1].attn1.to_q.register_forward_hook(lambda one, args, out: out + out.mean(0, keepdim=True))


def share(module: Any) -> None:
    for block in module.blocks:
        block.attn1.set_processor(Shared())


def doubled(module: Any, call: Call, number: int) -> Tensor:
    return call(0)


def couple(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda one, args, out: out + out.mean(0, keepdim=True))


def keep(module: Any) -> None:
    block, kept = module.blocks[1], []
    theirs = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.append(theirs(*args, **kwargs))
        return kept[-1] + 0.1 * kept[max(0, len(kept) - 2)]

    block.forward = forward


def keep_whole(module: Any) -> None:
    theirs, kept = module.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.append(theirs(*args, **kwargs)[0])
        return (kept[-1] + 0.1 * kept[max(0, len(kept) - 2)],)

    module.forward = forward


GUIDANCE = {
    "plain": Guided(),
    "skipped layers": Guided(by_guider(skipping)),
    "skipped layers without guidance": Guided(by_guider(lambda: skipping(guidance_scale=1.0))),
    "skipped attention": Guided(by_guider(lambda: skipping(skip_ff=False)), model=MODELS["pixart"]),
    "auto guidance": Guided(by_guider(lambda: worse(1.0))),
    "auto guidance that draws": Guided(
        by_guider(lambda: worse(0.5)), refused="draws random numbers for a rank's own tokens"
    ),
    "an adapter for each branch": Guided(by_branch, with_adapters),
    "adapters switched late": Guided(later, with_adapters),
    "processors that read other rows": Guided(doubled, share, rows=4),
    "a hook that reads other rows": Guided(doubled, couple, rows=4),
    "a forward that keeps its results": Guided(both, keep),
    "a forward of the whole transformer": Guided(
        both, keep_whole, early=True, refused="its forward keep_whole.<locals>.forward may decide by one rank's tokens"
    ),
    "a hook on an adapter's layer": Guided(doubled, hook_adapters, rows=4),
}


# Caches between steps: what only extrapolates is right, what decides by its tokens is refused

caches: Any = diffusers.hooks  # pyright sees no names that a package passes on
TIMES = {"current_timestep_callback": lambda: 900 - 100 * CLOCK["step"]}
BLOCKS = {"spatial_attention_block_identifiers": ("blocks",)}
# name -> what makes its config, what puts it on without `enable_cache`, why tokens cannot be split
CACHES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], object], str | None]] = {
    "TaylorSeer": (
        lambda: caches.TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=2,
            cache_identifiers=[r"blocks\.\d+\.attn1"],
            taylor_factors_dtype=None,
        ),
        caches.apply_taylorseer_cache,
        None,
    ),
    "MagCache": (
        lambda: caches.MagCacheConfig(
            threshold=1.0, retention_ratio=0.3, num_inference_steps=6, mag_ratios=torch.linspace(1, 0.9, 6)
        ),
        caches.apply_mag_cache,
        None,
    ),
    "MagCache that calibrates": (
        lambda: caches.MagCacheConfig(calibrate=True, num_inference_steps=6),
        caches.apply_mag_cache,
        "MagCache measures its ratios on a rank's own tokens",
    ),
    "PyramidAttentionBroadcast": (
        lambda: caches.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, **BLOCKS, **TIMES),
        caches.apply_pyramid_attention_broadcast,
        None,
    ),
    "FasterCache": (
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
        None,
    ),
    "FirstBlockCache": (
        lambda: caches.FirstBlockCacheConfig(threshold=10.0),
        caches.apply_first_block_cache,
        "FirstBlockCache decides by a mean over a rank's own tokens",
    ),
    "SeaCache": (
        lambda: caches.SeaCacheConfig(threshold=10.0),
        caches.apply_sea_cache,
        "SeaCache decides by a rank's own tokens",
    ),
    "TextKVCache": (
        lambda: caches.TextKVCacheConfig(),
        text_kv_cache.apply_text_kv_cache,
        "TextKVCache finds a text by its address",
    ),
}


def with_cache(name: str, how: str) -> Guided:
    """Return the case of a cache. how: by `enable_cache`, or so before `parallelize`, or unannounced by a function."""
    config, apply, refused = CACHES[name]
    refused = None if name == "FirstBlockCache" and how != "apply" else refused  # our step cache takes its place
    put = (lambda module: apply(module, config())) if how == "apply" else lambda module: module.enable_cache(config())
    return Guided(before=put, refused=refused, early=how == "before", always=name == "TextKVCache", steps=6)


CASES = GUIDANCE | {
    f"{name}, {how}": with_cache(name, how) for name in CACHES for how in ("enabled", "apply", "before")
}

CASES["FirstBlockCache, disabled"] = Guided(
    before=lambda module: (module.enable_cache(CACHES["FirstBlockCache"][0]()), module.disable_cache()), steps=6
)


@cache
def truth(name: str, device: str) -> Tensor:
    """Return the latents of the unchanged transformer, computed on "cpu" or "cuda"."""
    module = CASES[name].model.build().to(device)
    CASES[name].before(module)
    return CASES[name].run(module, device).cpu()


def sharded(rank: int, world: int, device: torch.device, name: str, cfg: int) -> Tensor | str:
    case, module = CASES[name], CASES[name].model.build().to(device)
    try:
        if case.early:
            case.before(module)
        seqpar.parallelize(module, make_mesh(device, cfg=cfg))
        if not case.early:
            case.before(module)
        in_double(module)
        return case.run(module, device)
    except ValueError as error:
        return str(error)


BRANCHES = {"adapters switched late", "an adapter for each branch", "auto guidance"}  # they concern the cfg axis alone
LAYOUTS = [*((2, 2, name) for name in GUIDANCE), *((2, 1, name) for name in GUIDANCE if name not in BRANCHES), *MORE]
# each cache in one of the ways where branches are on other ranks; else by `enable_cache`, and in another if refused
LAYOUTS += [(2, 2, f"{name}, {('enabled', 'apply', 'before')[index % 3]}") for index, name in enumerate(CACHES)]
LAYOUTS += [
    (3 - index % 2, 1, f"{name}, {how}")
    for index, name in enumerate(CACHES)
    for how in ("enabled", ("before", "apply")[index % 2])[: 1 if CACHES[name][-1] is None else 2]
]
LAYOUTS += [(2, 1, "FirstBlockCache, before"), (2, 1, "FirstBlockCache, disabled")]


@pytest.mark.parametrize(("world", "cfg", "name"), LAYOUTS)
def test_guidance_and_caches_are_right_or_refused(ranks: Pool, world: int, cfg: int, name: str) -> None:
    refused = CASES[name].refused if world > cfg or CASES[name].always else None
    assert_right_or_refused(ranks.run(world, sharded, name, cfg), truth(name, ranks.device), TOLERANCE, refused)


def released(rank: int, world: int, device: torch.device, name: str) -> Tensor:
    module = CASES[name].model.build().to(device)
    CASES[name].before(module)
    seqpar.parallelize(module, make_mesh(device))
    seqpar.release(module)
    return CASES[name].run(module, device)


def test_diffusers_own_cache_is_there_again_after_the_release(ranks: Pool) -> None:
    name = "FirstBlockCache, before"
    assert_right_or_refused(ranks.run(2, released, name), truth(name, ranks.device), TOLERANCE, None)


def test_negative_control_every_case_changes_the_latents(ranks: Pool) -> None:
    @cache
    def plain(rows: int, kind: str, steps: int) -> Tensor:
        model = TINY if kind == TINY.kind else MODELS["pixart"]
        case = Guided(both if rows == 1 else doubled, rows=rows, model=model, steps=steps)
        return case.run(model.build().to(ranks.device), ranks.device).cpu()

    skip_nothing = {f"{name}, enabled" for name in ("MagCache that calibrates", "SeaCache", "TextKVCache")}
    for name in {*GUIDANCE, *(f"{name}, enabled" for name in CACHES)} - skip_nothing - {"plain"}:
        latents = plain(CASES[name].rows, CASES[name].model.kind, CASES[name].steps)
        assert (truth(name, ranks.device) - latents).abs().max() > VISIBLE, name


PLAIN = Guided()
CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook, then eval()": lambda module: (couple(module), module.eval()),
    "a hook on an adapter's layer": lambda module: module.blocks[0].attn1.to_q.register_forward_hook(
        lambda one, args, out: 2 * out
    ),
    "a weight in place": lambda module: module.proj_out.weight.mul_(2),
    "a buffer": lambda module: module.blocks[0].register_buffer("noted", torch.ones(1)),
    "a scale": lambda module: module.blocks[0].attn1.to_q.scaling.update(a=0.1),
}


def changed(rank: int, world: int, device: torch.device, name: str) -> str:
    module, given = TINY.build().to(device), moved(TINY.inputs(1), device)
    add(module, "a", seed=1)
    module.blocks[0].register_buffer("noted", torch.zeros(1))
    seqpar.parallelize(module, make_mesh(device, cfg=2))

    def call(text: int) -> Tensor:
        with PLAIN.labelled(module, text):
            return module(**given, return_dict=False)[0]

    for _ in range(3):
        sum(x.sum() for x in [call(0), call(1)])
    call(0)  # is deferred
    try:
        with torch.no_grad():
            CHANGES[name](module)
        call(1)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_of_a_step_is_refused(ranks: Pool, name: str) -> None:
    for message in ranks.run(2, changed, name):
        assert "of WanTransformer3DModel changed between the guidance calls of a step" in message
        assert message.endswith("Use parallelize(cfg=False)")


# cache-dit -----------------------------------------------------------------------------------------------------

DECIDES = "cache-dit decides by a rank's own tokens"
STEPS_OF_DIT = 6


def with_cache_dit(rank: int, world: int, device: torch.device, name: str, cfg: int, how: str) -> Tensor | str:
    """Return a pipeline's latents with the cache of cache-dit, or the message of the ValueError.

    how: whether it is enabled "before" or "after" `parallelize`, or "whole" without that.
    """
    cache_dit: Any = importlib.import_module("cache_dit")
    case, pipe = PIPELINES[name], PIPELINES[name].pipe().to(device)
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


WAYS = ((1, 1, "before"), (2, 2, "before"), (2, 1, "before"), (1, 1, "after"), (2, 1, "after"))


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_cache_dit_is_right_or_refused(ranks: Pool, name: str) -> None:
    """With FLUX.1 it sets a forward of its own, which does not call ours."""
    pytest.importorskip("cache_dit")
    late = "was replaced after parallelize by CachedAdapter" if name == "flux" else "was enabled after parallelize"
    (true,) = ranks.run(1, with_cache_dit, name, 1, "whole")
    plain = PIPELINES[name].pictures(PIPELINES[name].pipe().to(ranks.device), steps=STEPS_OF_DIT).cpu()
    assert (true - plain).abs().max() > VISIBLE
    for world, cfg, how in WAYS:
        refused = late if how == "after" else DECIDES if world > cfg else None
        results = ranks.run(world, with_cache_dit, name, cfg, how)
        # latents that are not decoded stay a rank's own
        assert_right_or_refused(results[: 1 if refused is None else world], true, 1e-12, refused)
