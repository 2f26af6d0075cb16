"""Tests of a toy model: two streams and several states are sharded as on one rank.

`tests/test_one_file.py` puts the same file into the folder of models.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.loop.blueprint import Blueprint
from seqpar.loop.interface import Prompt, SequenceModel
from seqpar.loop.request import Request
from seqpar.loop.run import Run, begin
from seqpar.verifying.own_loop import ByFormula
from tests.graphs.test_distributed import local
from tests.support.meshes import EXACT, mesh_for, random
from tests.support.one_file.models import two_streams
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode

CLOSE, STEPS, IMAGES = 1e-9, 3, 2
GUIDANCE = Guidance(3.0)
Layout = tuple[str, int, int]  # strategy, cfg, data
ALONE: Layout = ("ulysses", 1, 1)
LAYOUTS: list[tuple[int, Layout]] = [
    (2, ("ulysses", 1, 1)),
    (2, ("kv_first", 2, 1)),
    (3, ("ring", 1, 1)),
    (3, ("kv_gather", 1, 1)),
]


def model_of(size: str, device: torch.device, seed: int = 0, **change: Any) -> SequenceModel:
    # weights are so large that every part of the model matters
    config = replace(two_streams.SIZES[size], **change)
    model = Blueprint(size, two_streams, config).build(torch.float64, device, seed)
    for index, parameter in enumerate(model.parameters()):
        parameter.copy_(random(tuple(parameter.shape), 100 * seed + index, device) * 0.4)
    return model


def prompts(length: int) -> tuple[Prompt, Prompt]:
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


def engine(world: int, device: torch.device, layout: Layout, size: str) -> DistributedDiT:
    mesh = mesh_for(layout[0], world, device, *layout[1:])
    return DistributedDiT(model_of(size, device), mesh, layout[0], local(device))


def exactly(rank: int, world: int, device: torch.device, *rows: tuple[Layout, bool]) -> list[Tensor]:
    """Latents on each layout, in exact mode or not, by products whose rows do not depend on each other."""
    found = []
    for layout, on in rows:
        with exact_mode() if on else nullcontext(), by_rows():
            found.append(stepped(start(engine(world, device, layout, "two-streams"), 5))["image"])
    return found


EXACT_ROWS: dict[int, list[tuple[Layout, bool]]] = {
    2: [(("ulysses", 1, 2), True), (("kv_gather", 1, 1), False)],
    3: [((strategy, 1, 1), True) for strategy in EXACT],
    4: [(("ulysses", 2, 1), True)],
}


@pytest.mark.parametrize("world", EXACT_ROWS)
def test_in_exact_mode_latents_have_one_ranks_bits(cpu_ranks: Pool, world: int) -> None:
    """Outside of exact mode, the negative control, they have not."""
    (wanted,) = exactly(0, 1, torch.device("cpu"), (ALONE, True))
    for found in cpu_ranks.run(world, exactly, *EXACT_ROWS[world]):
        for (layout, on), got in zip(EXACT_ROWS[world], found, strict=True):
            assert torch.equal(got, wanted) is on, layout


def by_hand(model: SequenceModel, prompt: Prompt, t: Tensor) -> Tensor:
    """The prediction for each image alone."""
    made, length = [], prompt["text"].shape[1]
    for image in range(IMAGES):
        text, pooled = prompt["text"][image : image + 1], prompt["pooled"][image : image + 1]
        encoded = model.encode(text=text, pooled=pooled)
        streams = {"text": encoded.streams["text"], "image": model.patchify(noise()[image : image + 1])}
        positions = model.stream_positions((6, 6), {"text": length, "image": 9})
        conditioning = model.modulate(t[None], **encoded.pooled)
        made.append(model.forward_tokens(streams, positions, conditioning, ByFormula(length + 9))["image"])
    return torch.cat(made)


@pytest.mark.parametrize("length", [5, 1])
def test_a_prediction_is_the_models_on_each_text_alone(length: int) -> None:
    dit, (prompt, negative) = engine(1, torch.device("cpu"), ALONE, "two-streams"), prompts(length)
    run = start(dit, length)
    cond, uncond = (by_hand(dit.model, given, run.timesteps[0]) for given in (prompt, negative))
    guided = uncond + GUIDANCE.scale * (cond - uncond)
    assert (run.predict()["image"] - guided).abs().max() < CLOSE
    assert (cond - uncond).abs().max() > 1e-2


def fresh(dit: DistributedDiT, turn: int = 0) -> Tensor:
    """Latents of a model whose text has other tokens at every step."""
    drawn = {"text": random((STEPS, IMAGES, 5, 6), 8).roll(turn, 0)}
    return stepped(start(dit, 5, prompt={"pooled": random((IMAGES, 6), 5)}, negative=None, drawn=drawn))["image"]


def results(rank: int, world: int, device: torch.device, layout: Layout, length: int) -> dict[str, Tensor]:
    """What every kind of run and a call compute on this mesh."""
    dit, prompt = engine(world, device, layout, "two-streams"), prompts(length)[0]
    found = {
        "latents": stepped(start(dit, length))["image"],
        "call": dit(noise(), timestep=torch.tensor([500, 3]), **prompt).sample,
        "fresh": fresh(engine(world, device, layout, "fresh-text")),
    }
    noises = {"image": noise(), "token": random((IMAGES, 1, 12), 3)}  # several streams are denoised together
    return found | stepped(start(engine(world, device, layout, "two-states"), length, noise=noises))


@cache
def alone(ranks: Pool, length: int) -> dict[str, Tensor]:
    return ranks.run(1, results, ALONE, length)[0]


@pytest.mark.parametrize(
    ("world", "layout", "length"), covering([pytest.param(*each) for each in LAYOUTS], turns=[7, 5, 2]), ids=str
)
def test_a_new_model_is_the_same_on_every_mesh(ranks: Pool, world: int, layout: Layout, length: int) -> None:
    """Some cases have fewer text tokens than ranks."""
    for found in ranks.run(world, results, layout, length):
        for name, truth in alone(ranks, length).items():
            assert found[name].shape == truth.shape
            assert (found[name] - truth).abs().max() < CLOSE * truth.abs().max(), name


def test_negative_control_text_matters(ranks: Pool) -> None:
    found = alone(ranks, 5)
    assert (found["latents"] - alone(ranks, 7)["latents"]).abs().max() > 1e-2
    turned = fresh(engine(1, torch.device("cpu"), ALONE, "fresh-text"), 1)
    assert (found["fresh"] - turned).abs().max() > 1e-3


def again(
    rank: int, world: int, device: torch.device, lengths: tuple[int, ...], rows: tuple[int, ...], pooled: bool
) -> list[Tensor]:
    """Runs of one sampler: the text of each has another length, and as many of its rows differ."""
    dit, found = engine(world, device, ("kv_gather", 1, 1), "two-streams"), []
    if not pooled:  # all that depends on the prompt is the text
        model: Any = dit.model
        encode, modulate, none = model.encode, model.modulate, torch.zeros(1, 6, dtype=torch.float64, device=device)
        model.encode = lambda **prompt: replace(encode(**prompt), pooled={})
        model.modulate = lambda t_R, **pooled: modulate(t_R, pooled=none.expand(len(t_R), -1))
    with Sampler(dit) as sampler:
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


def test_inputs_of_a_run_must_have_a_row_an_image() -> None:
    cpu = torch.device("cpu")
    dit = engine(1, cpu, ALONE, "two-streams")
    with pytest.raises(ValueError, match=r"got text of shape \(1, 5, 6\), expected \(2,\), one per image"):
        start(dit, 5, negative={name: x[:1] for name, x in prompts(5)[1].items()})
    with pytest.raises(ValueError, match=r"got a negative text of shape \(4, 6\) per row, expected \(5, 6\)"):
        start(dit, 5, negative=prompts(4)[1])
    dit = engine(1, cpu, ALONE, "fresh-text")
    prompt = {"pooled": random((IMAGES, 6), 5)}
    for shape in ((STEPS - 1, IMAGES, 5, 6), (STEPS, IMAGES + 1, 5, 6)):
        drawn = {"text": random(shape, 8)}
        with pytest.raises(ValueError, match=r"got drawn text of shape .*, expected \(3, 2, tokens, width\)"):
            start(dit, 5, prompt=prompt, negative=None, drawn=drawn)


def test_video_latents_are_cut_in_three_dimensions() -> None:
    model = model_of("two-streams", torch.device("cpu"), patch_size=(2, 2, 3))
    x = random((2, 4, 4, 6, 9), 0)
    tokens = model.patchify(x)
    assert tokens.shape == (2, 2 * 3 * 3, 4 * 12)
    assert torch.equal(model.unpatchify(tokens, 4, 6, 9), x)
    assert torch.equal(tokens[0, 10], x[0, :, 2:4, 0:2, 3:6].flatten())
    with pytest.raises(ValueError, match="got a latent of 4 x 6 x 8, expected multiples"):
        model.check_size(4, 6, 8)
