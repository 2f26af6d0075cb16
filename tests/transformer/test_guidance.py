# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests guidance that changes a transformer between the calls of a step, or couples the rows of a batch.

The truth is the unchanged transformer or pipeline in one process. Each case runs with the cfg axis, which computes two
branches at the same time where nothing forbids it, and with ranks that share the tokens; a case that cannot be right
there is refused before the first step ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from diffusers.guiders.auto_guidance import AutoGuidance
from diffusers.guiders.skip_layer_guidance import SkipLayerGuidance
from diffusers.hooks.layer_skip import LayerSkipConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

import seqpar
from tests.support.diffusers_tiny import PIXART, WAN, Tiny, moved, pixart, wan
from tests.support.foreign import StayDouble, assert_right_or_refused, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.transformer.test_lora import add

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here
TOLERANCE = 1e-10
VISIBLE = 1e-3
STEPS = 3  # the first shows pairs of calls, which the next ones promise; the last may be another
MORE = [(1, 1, "skipped layers"), (3, 1, "skipped layers"), (4, 2, "plain")]
TINY = Tiny("WanTransformer3DModel", {**WAN, "num_layers": 3}, wan)
PLAIN_PROCESSORS = Tiny("PixArtTransformer2DModel", PIXART, pixart)  # whose processors know no dispatcher
Call = Callable[..., Tensor]
Step = Callable[[Any, Call, int], Tensor]


@dataclass
class Guided:
    """A loop of guided steps. before: changes the transformer; step: returns a step's prediction of all its calls.

    early: whether it is changed before `parallelize`. refused: the words of the error with which ranks that share
    tokens refuse it; None where they are right, too.
    """

    step: Step
    before: Callable[[Any], object] = lambda module: None
    rows: int = 1
    refused: str | None = None
    model: Tiny = TINY
    early: bool = False

    def run(self, module: Any, device: torch.device | str = "cpu", changed: bool = False) -> Tensor:
        """Return the latents after all steps. changed: whether the transformer is changed already."""
        if not changed:
            self.before(module)
        torch.manual_seed(0)
        given = moved(self.model.inputs(self.rows), device)
        latents = given["hidden_states"]
        with torch.no_grad(), StayDouble():
            for number in range(STEPS):

                def call(text: int, latents: Tensor = latents) -> Tensor:
                    texts = random(tuple(given["encoder_hidden_states"].shape), 20 + text, device)
                    arguments = {**given, "hidden_states": latents, "encoder_hidden_states": texts}
                    with labelled(module, text):
                        return module(**arguments, return_dict=False)[0][:, : latents.shape[1]]  # without variances

                latents = latents - 0.2 * self.step(module, call, number)
        return latents


def labelled(module: Any, text: int) -> AbstractContextManager[Any]:
    """Name a call as diffusers' pipelines do; PixArt's transformers take no names."""
    return module.cache_context("uncond" if text else "cond") if hasattr(module, "cache_context") else nullcontext()


def by_guider(make: Callable[[], Any]) -> Step:
    """Return the step of diffusers' modular pipelines with a guider."""
    kept: list[Any] = []

    def step(module: Any, call: Call, number: int) -> Tensor:
        if not number:
            kept[:] = [make()]
        guider = kept[0]
        guider.set_state(step=number, num_inference_steps=STEPS, timestep=torch.tensor(number))
        batches = guider.prepare_inputs({"text": (torch.tensor(0), torch.tensor(1))})
        for batch in batches:
            guider.prepare_models(module)
            batch.noise_pred = call(int(batch.text))
            guider.cleanup_models(module)
        return guider(batches).pred

    return step


def skipping(guidance_scale: float = 7.5, **layers: Any) -> Any:
    """Return a guider that computes a further call with skipped layers, from the second step on."""
    config = LayerSkipConfig([1], **layers)
    return SkipLayerGuidance(guidance_scale, skip_layer_guidance_stop=1.0, skip_layer_config=config)


def worse(dropout: float) -> Any:
    """Return a guider whose second call drops a layer, or some of its outputs."""
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
    if number == STEPS - 1:
        module.set_adapters(["b"], [0.7])
    return 2 * first - call(1)


class Shared(WanAttnProcessor):
    """Attention to a mean with the batch's first row, as methods for one style in all pictures have it."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what diffusers' processor does for the mean."""
        return super().__call__(attn, (hidden_states + hidden_states[:1]) / 2, *args, **kwargs)


def hook_adapters(module: Any) -> None:
    """Put a hook on an adapter's layer that adds the mean over the rows."""
    add(module, "a", seed=1)
    module.blocks[1].attn1.to_q.register_forward_hook(lambda one, args, out: out + out.mean(0, keepdim=True))


def share(module: Any) -> None:
    for block in module.blocks:
        block.attn1.set_processor(Shared())


def doubled(module: Any, call: Call, number: int) -> Tensor:
    """Return the prediction of a batch of both branches' rows."""
    return call(0)


def couple(module: Any) -> None:
    """Put a hook on a block that adds the mean over the rows."""
    module.blocks[1].register_forward_hook(lambda one, args, out: out + out.mean(0, keepdim=True))


def keep(module: Any) -> None:
    """Put a forward on a block that adds what it returned in the call before."""
    block, kept = module.blocks[1], []
    theirs = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.append(theirs(*args, **kwargs))
        return kept[-1] + 0.1 * kept[max(0, len(kept) - 2)]

    block.forward = forward


def keep_whole(module: Any) -> None:
    """Put a forward on the transformer itself that adds what it returned in the call before, as caches do."""
    theirs, kept = module.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.append(theirs(*args, **kwargs)[0])
        return (kept[-1] + 0.1 * kept[max(0, len(kept) - 2)],)

    module.forward = forward


def both(module: Any, call: Call, number: int) -> Tensor:
    """Return plain guidance."""
    first = call(0)
    return 3 * call(1) - 2 * first


PLAIN = Guided(both)
CASES = {
    "plain": PLAIN,
    "skipped layers": Guided(by_guider(skipping)),
    "skipped layers without guidance": Guided(by_guider(lambda: skipping(guidance_scale=1.0))),
    "skipped attention": Guided(by_guider(lambda: skipping(skip_ff=False)), model=PLAIN_PROCESSORS),
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


@cache
def truth(name: str, device: str) -> Tensor:
    """Return the latents of the unchanged transformer, computed on "cpu" or "cuda"."""
    return CASES[name].run(CASES[name].model.build().to(device), device).cpu()


def sharded(rank: int, world: int, device: torch.device, name: str, cfg: int) -> Tensor | str:
    """Return this rank's latents, or the message of the ValueError."""
    case, module = CASES[name], CASES[name].model.build().to(device)
    if case.early:
        case.before(module)
    try:
        seqpar.parallelize(module, make_mesh(device, cfg=cfg))
        in_double(module)
        return case.run(module, device, case.early)
    except ValueError as error:
        return str(error)


BRANCHES = {"adapters switched late", "an adapter for each branch", "auto guidance"}  # they concern the cfg axis alone
LAYOUTS = [*((2, 2, name) for name in CASES), *((2, 1, name) for name in CASES if name not in BRANCHES), *MORE]


@pytest.mark.parametrize(("world", "cfg", "name"), LAYOUTS)
def test_guidance_is_right_or_refused(ranks: Pool, world: int, cfg: int, name: str) -> None:
    refused = CASES[name].refused if world > cfg else None
    assert_right_or_refused(ranks.run(world, sharded, name, cfg), truth(name, ranks.device), TOLERANCE, refused)


def test_negative_control_every_case_changes_the_latents(ranks: Pool) -> None:
    @cache
    def plain(rows: int, tiny: str) -> Tensor:
        case = Guided(both if rows == 1 else doubled, rows=rows, model=TINY if tiny == TINY.kind else PLAIN_PROCESSORS)
        return case.run(case.model.build().to(ranks.device), ranks.device).cpu()

    for name in CASES.keys() - {"plain"}:
        latents = plain(CASES[name].rows, CASES[name].model.kind)
        assert (truth(name, ranks.device) - latents).abs().max() > VISIBLE, name


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
    """Return the message of a second call before which a transformer was changed, while the first one waits."""
    module, given = TINY.build().to(device), moved(TINY.inputs(1), device)
    add(module, "a", seed=1)
    module.blocks[0].register_buffer("noted", torch.zeros(1))
    seqpar.parallelize(module, make_mesh(device, cfg=2))

    def call(text: int) -> Tensor:
        with labelled(module, text):
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
