"""Tests of a toy model: two streams and several states are sharded as on one rank.

`tests/test_one_file.py` puts the same file into the folder of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.attention._streams import given
from seqpar.kernels.prepare import prepare
from seqpar.loop.blueprint import Blueprint
from seqpar.loop.interface import Prompt, SequenceModel
from seqpar.loop.request import Request
from seqpar.loop.run import Run, begin
from seqpar.mesh.mesh import Mesh
from seqpar.types.protocols import Stream
from tests.graphs.test_distributed import local
from tests.support.meshes import EXACT, mesh_for, random
from tests.support.meshes import LAYOUTS as STRATEGIES
from tests.support.one_file.models import two_streams
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode

CLOSE, STEPS, IMAGES = 1e-9, 3, 2
GUIDANCE = Guidance(3.0)
# world, (strategy, cfg, data)
LAYOUTS = [(2, ("ulysses", 1, 1)), (2, ("kv_first", 2, 1)), (3, ("ring", 1, 1)), (3, ("kv_gather", 1, 1))]


def model_of(preset: str, device: torch.device, seed: int = 0, **change: Any) -> SequenceModel:
    """Return the toy with random weights, large enough that every part of the model matters."""
    config = replace(two_streams.PRESETS[preset], **change)
    model = Blueprint(preset, two_streams, config).build(torch.float64, device, seed)
    for index, parameter in enumerate(model.parameters()):
        parameter.copy_(random(tuple(parameter.shape), 100 * seed + index, device) * 0.4)
    return model


def prompts(length: int) -> tuple[Prompt, Prompt]:
    """Return the prompts with and without text."""
    texts = [random((IMAGES, length, 6), seed) for seed in (0, 1)]
    return {"text": texts[0], "pooled": random((IMAGES, 6), 5)}, {"text": texts[1], "pooled": random((IMAGES, 6), 6)}


def noise() -> Tensor:
    return random((IMAGES, 4, 6, 6), 9)


def start(dit: DistributedDiT, length: int, guidance: Guidance = GUIDANCE, **more: Any) -> Run:
    prompt, negative = prompts(length)
    settings: dict[str, Any] = {"negative": negative, "noise": noise(), "prompt": prompt, **more}
    return begin(dit, Request(scheduler=DDIMScheduler(clip_sample=False), steps=STEPS, guidance=guidance, **settings))


def stepped(run: Run) -> dict[str, Tensor]:
    for _ in range(len(run.timesteps)):
        run.step()
    return run.latents()


def engine(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], model: SequenceModel
) -> DistributedDiT:
    strategy, cfg, data = layout
    return DistributedDiT(model, mesh_for(strategy, world, device, cfg, data), strategy, local(device))


def sampled(
    rank: int,
    world: int,
    device: torch.device,
    layout: tuple[str, int, int],
    length: int,
    guidance: Guidance = GUIDANCE,
) -> Tensor:
    """Return the latents of the model with two streams."""
    return stepped(start(engine(rank, world, device, layout, model_of("two-streams", device)), length, guidance))[
        "image"
    ]


@cache
def alone(ranks: Pool, *more: Any) -> Tensor:
    return ranks.run(1, sampled, ("ulysses", 1, 1), *more)[0]


def exactly(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], length: int, on: bool = True
) -> Tensor:
    """Return the same in exact mode, by products whose rows do not depend on each other."""
    with exact_mode() if on else nullcontext(), by_rows():
        return sampled(rank, world, device, layout, length)


EXACT_LAYOUTS = [
    *((world, (strategy, 1, 1)) for world in (2, 3) for strategy in EXACT),
    *((world, ("ulysses", *axes)) for world, axes in ((2, (2, 1)), (2, (1, 2)), (4, (2, 1)))),
]


@pytest.mark.parametrize(("world", "layout"), EXACT_LAYOUTS, ids=str)
def test_in_exact_mode_latents_have_one_ranks_bits(cpu_ranks: Pool, world: int, layout: tuple[str, int, int]) -> None:
    wanted = exactly(0, 1, torch.device("cpu"), ("ulysses", 1, 1), 5)
    for got in cpu_ranks.run(world, exactly, layout, 5):
        assert torch.equal(got, wanted)


def test_negative_control_out_of_exact_mode_bits_differ(cpu_ranks: Pool) -> None:
    wanted = exactly(0, 1, torch.device("cpu"), ("ulysses", 1, 1), 5)
    for got in cpu_ranks.run(2, exactly, ("kv_gather", 1, 1), 5, False):
        assert not torch.equal(got, wanted)


class Plain:
    """Attention of whole streams, written out."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Callable[[], None] | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        assert mask_BL is None
        assert beside is None
        assert only is None
        made = [given(stream) for stream in streams]
        pairs = [prepare(x.q, x.k, x.prepare) for x in made]
        q, k = (torch.cat([pair[part] for pair in pairs], dim=1).transpose(1, 2) for part in (0, 1))
        v = torch.cat([x.v for x in made], dim=1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out.split([x.tokens for x in made], dim=1)


def by_hand(model: SequenceModel, prompt: Prompt, t: Tensor) -> Tensor:
    """Return the prediction for each image alone."""
    made, length = [], prompt["text"].shape[1]
    for image in range(IMAGES):
        text, pooled = prompt["text"][image : image + 1], prompt["pooled"][image : image + 1]
        encoded = model.encode(text=text, pooled=pooled)
        streams = {"text": encoded.streams["text"], "image": model.patchify(noise()[image : image + 1])}
        positions = model.stream_positions((6, 6), {"text": length, "image": 9})
        conditioning = model.modulate(t[None], **encoded.pooled)
        made.append(model.forward_tokens(streams, positions, conditioning, Plain(length + 9))["image"])
    return torch.cat(made)


@pytest.mark.parametrize("length", [5, 1])
def test_a_prediction_is_the_models_on_each_text_alone(length: int) -> None:
    model, (prompt, negative) = model_of("two-streams", torch.device("cpu")), prompts(length)
    run = start(DistributedDiT(model, Mesh.single()), length)
    cond, uncond = (by_hand(model, given, run.timesteps[0]) for given in (prompt, negative))
    truth = uncond + GUIDANCE.scale * (cond - uncond)
    assert (run.predict()["image"] - truth).abs().max() < CLOSE
    assert (cond - uncond).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("world", "layout", "length"), covering([pytest.param(*each) for each in LAYOUTS], turns=[7, 5, 2]), ids=str
)
def test_a_new_model_is_the_same_on_every_mesh(
    ranks: Pool, world: int, layout: tuple[str, int, int], length: int
) -> None:
    """Some cases have fewer text tokens than ranks."""
    truth = alone(ranks, length)
    for got in ranks.run(world, sampled, layout, length):
        assert (got - truth).abs().max() < CLOSE * truth.abs().max()


def test_negative_control_the_text_matters(ranks: Pool) -> None:
    assert (alone(ranks, 5) - alone(ranks, 7)).abs().max() > 1e-2


@pytest.mark.parametrize(("world", "layout"), [(2, ("ulysses", 1, 1)), (3, ("ring", 1, 1))], ids=str)
def test_rescaled_guidance_is_diffusers_on_every_mesh(ranks: Pool, world: int, layout: tuple[str, int, int]) -> None:
    guidance = Guidance(3.0, rescale=0.7)
    truth = alone(ranks, 5, guidance)
    for got in ranks.run(world, sampled, layout, 5, guidance):
        assert (got - truth).abs().max() < CLOSE * truth.abs().max()
    assert (truth - alone(ranks, 5)).abs().max() > 1e-3


def test_rescaled_guidance_has_the_deviation_that_the_paper_says() -> None:
    dit = DistributedDiT(model_of("two-streams", torch.device("cpu")), Mesh.single())
    cond, uncond = start(dit, 5).branches()["image"]
    assert uncond is not None
    guided = uncond + 3.0 * (cond - uncond)
    deviation = [x.std(dim=(1, 2), keepdim=True) for x in (cond, guided)]
    truth = 0.7 * guided * deviation[0] / deviation[1] + 0.3 * guided
    got, none = start(dit, 5, Guidance(3.0, rescale=0.7))._rescaled("image", cond, uncond)
    assert none is None
    assert (got - truth).abs().max() < CLOSE * truth.abs().max()


def again(
    rank: int, world: int, device: torch.device, lengths: tuple[int, ...], rows: tuple[int, ...], pooled: bool
) -> list[Tensor]:
    """Runs of one sampler: the text of each has another length, and as many of its rows differ."""
    model = model_of("two-streams", device)
    if not pooled:  # all that depends on the prompt is the text
        encode, modulate, none = model.encode, model.modulate, torch.zeros(1, 6, dtype=torch.float64, device=device)
        model.encode = lambda **prompt: replace(encode(**prompt), pooled={})
        model.modulate = lambda t_R, **pooled: modulate(t_R, pooled=none.expand(len(t_R), -1))
    found = []
    with Sampler(engine(rank, world, device, ("kv_gather", 1, 1), model)) as sampler:
        for length, count in zip(lengths, rows, strict=True):
            prompt = {name: x[torch.arange(IMAGES) % count] for name, x in prompts(length)[0].items()}
            ddim, off = DDIMScheduler(clip_sample=False), Guidance(1.0)
            found.append(sampler(ddim, noise(), prompt, steps=STEPS, guidance=off))
    return found


@pytest.mark.parametrize(
    ("lengths", "rows", "pooled"), [((5, 6, 5), (2, 2, 2), True), ((5, 5), (1, 2), False)], ids=str
)
def test_a_sampler_begins_anew_for_prompts_of_another_form(
    ranks: Pool, lengths: tuple[int, ...], rows: tuple[int, ...], pooled: bool
) -> None:
    """Texts of 5 and 6 tokens are the same share on rank 0 of 2, not on rank 1."""
    wanted = [
        ranks.run(1, again, (length,), (count,), pooled)[0][0] for length, count in zip(lengths, rows, strict=True)
    ]
    for found in ranks.run(2, again, lengths, rows, pooled):
        for got, truth in zip(found, wanted, strict=True):
            assert (got - truth).abs().max() < CLOSE * truth.abs().max()


def two_states(rank: int, world: int, device: torch.device, layout: tuple[str, int, int]) -> dict[str, Tensor]:
    dit = engine(rank, world, device, layout, model_of("two-states", device))
    return stepped(start(dit, 7, noise={"image": noise(), "token": random((IMAGES, 1, 12), 3)}))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[:3], ids=str)
def test_several_streams_are_denoised_together(ranks: Pool, world: int, layout: tuple[str, int, int]) -> None:
    truth = ranks.run(1, two_states, ("ulysses", 1, 1))[0]
    assert truth["token"].shape == (IMAGES, 1, 12)
    for found in ranks.run(world, two_states, layout):
        for name, got in found.items():
            assert (got - truth[name]).abs().max() < CLOSE * truth[name].abs().max()


def fresh(rank: int, world: int, device: torch.device, layout: tuple[str, int, int], turned: bool) -> Tensor:
    dit = engine(rank, world, device, layout, model_of("fresh-text", device))
    drawn = random((STEPS, IMAGES, 5, 6), 8)
    prompt = {"pooled": random((IMAGES, 6), 5)}
    return stepped(start(dit, 5, prompt=prompt, negative=None, drawn={"text": drawn.roll(int(turned), 0)}))["image"]


def test_a_stream_may_have_other_tokens_at_every_step(ranks: Pool) -> None:
    truth, other = (ranks.run(1, fresh, ("ulysses", 1, 1), turned)[0] for turned in (False, True))
    assert (truth - other).abs().max() > 1e-3
    for got in ranks.run(3, fresh, ("ring", 1, 1), False):
        assert (got - truth).abs().max() < CLOSE * truth.abs().max()


def test_inputs_of_a_run_must_have_a_row_an_image() -> None:
    cpu = torch.device("cpu")
    dit = engine(0, 1, cpu, ("ulysses", 1, 1), model_of("two-streams", cpu))
    with pytest.raises(ValueError, match=r"got text of shape \(1, 5, 6\), expected \(2,\), one per image"):
        start(dit, 5, negative={name: x[:1] for name, x in prompts(5)[1].items()})
    with pytest.raises(ValueError, match=r"got a negative text of shape \(4, 6\) per row, expected \(5, 6\)"):
        start(dit, 5, negative=prompts(4)[1])
    dit = engine(0, 1, cpu, ("ulysses", 1, 1), model_of("fresh-text", cpu))
    prompt = {"pooled": random((IMAGES, 6), 5)}
    for shape in ((STEPS - 1, IMAGES, 5, 6), (STEPS, IMAGES + 1, 5, 6)):
        drawn = {"text": random(shape, 8)}
        with pytest.raises(ValueError, match=r"got drawn text of shape .*, expected \(3, 2, tokens, width\)"):
            start(dit, 5, prompt=prompt, negative=None, drawn=drawn)


def called(rank: int, world: int, device: torch.device) -> Tensor:
    dit = engine(rank, world, device, ("ulysses", 1, 1), model_of("two-streams", device))
    prompt, _ = prompts(5)
    return dit(noise(), timestep=torch.tensor([500, 3]), **prompt).sample


def test_a_call_of_a_new_model_is_the_same_on_every_mesh(ranks: Pool) -> None:
    truth = ranks.run(1, called)[0]
    for got in ranks.run(2, called):
        assert (got - truth).abs().max() < CLOSE * truth.abs().max()


def planned(rank: int, world: int, device: torch.device) -> str:
    """Return the plan that the planner makes from the file's `work` if everything is "auto"."""
    dit = DistributedDiT(model_of("two-streams", device), local=local(device))
    return dit.strategy.name


def test_the_planner_knows_a_new_model(ranks: Pool) -> None:
    assert set(ranks.run(2, planned)) <= set(STRATEGIES)


def test_video_latents_are_cut_in_three_dimensions() -> None:
    model = model_of("two-streams", torch.device("cpu"), patch_size=(2, 2, 3))
    x = random((2, 4, 4, 6, 9), 0)
    tokens = model.patchify(x)
    assert tokens.shape == (2, 2 * 3 * 3, 4 * 12)
    assert torch.equal(model.unpatchify(tokens, 4, 6, 9), x)
    assert torch.equal(tokens[0, 10], x[0, :, 2:4, 0:2, 3:6].flatten())
    with pytest.raises(ValueError, match="got a latent of 4 x 6 x 8, expected multiples"):
        model.check_size(4, 6, 8)
