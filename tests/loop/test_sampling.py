"""Tests of the loop against diffusers' steps in one process: DDIM, guidance, every mesh, any scheduler."""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loop.loop import draw_noise
from seqpar.loop.request import Request
from seqpar.loop.run import Run, begin
from seqpar.loop.steppers import State
from seqpar.mesh.mesh import Mesh
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.tiny import CLASSES, diffusers_dit, shared_dit

STEPS, LABELS = 4, [3, 7, 3]
LINEAR = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
TOLERANCE = 1e-9  # of fp64; diffusers' coefficients are fp32, so tests of their own compare those


# (world, (strategy, cfg, data))
MESHES = [
    *((2, layout) for layout in (("ulysses", 1, 1), ("ulysses", 2, 1), ("ring", 1, 1), ("ulysses", 1, 2))),
    *((3, layout) for layout in (("ulysses", 1, 1), ("kv_gather", 1, 1), ("ring", 1, 1))),
    *((4, layout) for layout in (("usp", 1, 1), ("ulysses", 2, 1), ("ulysses", 2, 2), ("kv_gather", 2, 1))),
    (4, ("ulysses", 1, 1)),
]


def scheduler(name: str = "DDIMScheduler", **config: Any) -> Any:
    return getattr(diffusers, name)(**{**LINEAR, **({"clip_sample": False} if "DDIM" in name else {}), **config})


def by_hand(noise: Tensor, steps: int, guidance: Guidance, sched: Any, eta: float = 0.0) -> Tensor:
    """Return the latents of diffusers' model and scheduler in one process, with guidance as in the papers."""
    model, x = diffusers_dit().to(DEVICE), noise.double().to(DEVICE) * sched.init_noise_sigma
    labels = torch.tensor(LABELS[: len(noise)], device=DEVICE)
    sched.set_timesteps(steps)
    generator = torch.Generator().manual_seed(5)
    for t in sched.timesteps:
        seen = sched.scale_model_input(x, t)
        c, u = (
            model(seen, timestep=t.to(DEVICE).expand(len(x)), class_labels=y).sample[:, :4]
            for y in (labels, torch.full_like(labels, CLASSES))
        )
        channels = guidance.channels or 4
        out = torch.cat((u[:, :channels] + guidance.scale * (c - u)[:, :channels], c[:, channels:]), 1)
        out = out if guidance.on else c
        options = {"eta": eta, "generator": generator} if eta else {}
        x = sched.step(out, t, x, **options).prev_sample
    return x.cpu()


def run(
    rank: int,
    world: int,
    device: torch.device,
    layout: tuple[str, int, int],
    guidance: Guidance,
    images: int = 3,
    size: tuple[int, int] = (8, 8),
    name: str = "DDIMScheduler",
    eta: float = 0.0,
    config: tuple[tuple[str, Any], ...] = (),
    steps: int = STEPS,
) -> Tensor:
    strategy, cfg, data = layout
    mesh = mesh_for(strategy, world, device, cfg, data)
    dit = DistributedDiT(shared_dit(device), mesh, strategy, local(device))
    noise = draw_noise((images, 4, *size), torch.Generator().manual_seed(2))
    labels = {"class_labels": torch.tensor(LABELS[:images])}
    generator = torch.Generator().manual_seed(5)
    sched = scheduler(name, **dict(config))
    return sample(dit, sched, noise, labels, steps=steps, guidance=guidance, eta=eta, generator=generator)


@cache
def alone(ranks: Pool, guidance: Guidance, *more: Any) -> Tensor:
    """Return what one rank samples; it is the truth for all meshes and computed once."""
    return ranks.run(1, run, ("ulysses", 1, 1), guidance, *more)[0]


def noise(images: int = 3) -> Tensor:
    return draw_noise((images, 4, 8, 8), torch.Generator().manual_seed(2))


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("guidance", [Guidance(1.0), Guidance(3.0), Guidance(3.0, 3)], ids=str)
def test_sampling_equals_diffusers_by_hand(ranks: Pool, guidance: Guidance, eta: float) -> None:
    got = ranks.run(1, run, ("ulysses", 1, 1), guidance, 3, (8, 8), "DDIMScheduler", eta)[0]
    truth = by_hand(noise(), STEPS, guidance, scheduler(), eta)
    assert (got - truth).abs().max() < 1e-4 * truth.abs().max()  # diffusers' coefficients are fp32


GUIDANCES = {"alone": Guidance(1.0), "guided": Guidance(3.0), "channels": Guidance(3.0, 3)}
# every mesh with guidance on some channels and uneven tokens, which is the most general; some meshes with the others
GUIDED = [
    *((world, layout, "channels") for world, layout in MESHES),
    *((world, layout, "guided") for world, layout in MESHES if layout[1] == 2),
    *((world, (strategy, 1, data), "alone") for world, (strategy, _, data) in MESHES[2:9:3]),
]


@pytest.mark.parametrize(("world", "layout", "how"), GUIDED, ids=str)
def test_sampling_is_the_same_on_every_mesh(ranks: Pool, world: int, layout: tuple[str, int, int], how: str) -> None:
    guidance, size = GUIDANCES[how], (8, 8) if how == "guided" else (6, 10)
    truth = alone(ranks, guidance, 3, size)
    for got in ranks.run(world, run, layout, guidance, 3, size):
        assert (got - truth).abs().max() < TOLERANCE * truth.abs().max()


# DDIM with noise: on local tokens, and with whole images replicated on every rank
NOISY: dict[str, tuple[Any, ...]] = {
    "local": (3, (6, 10), "DDIMScheduler", 0.7, ()),
    "replicated": (3, (6, 10), "DDIMScheduler", 0.7, (("thresholding", True),)),
}


@pytest.mark.parametrize(
    ("world", "layout", "name"),
    [*((*mesh, "local") for mesh in MESHES), *((*mesh, "replicated") for mesh in MESHES[::3])],
    ids=str,
)
def test_sampling_with_noise_at_each_step_is_the_same_on_every_mesh(
    ranks: Pool, world: int, layout: tuple[str, int, int], name: str
) -> None:
    noisy = NOISY[name]
    truth = alone(ranks, Guidance(3.0), *noisy)
    for got in ranks.run(world, run, layout, Guidance(3.0), *noisy):
        assert (got - truth).abs().max() < TOLERANCE * truth.abs().max()
    still = alone(ranks, Guidance(3.0), *noisy[:3], 0.0, noisy[4])
    assert (truth - still).abs().max() > 1e-2


FEW: tuple[Any, ...] = (*NOISY["local"], 2)  # steps

# errors that one rank makes with its part of a step's noise
WRONG_NOISE = {
    "sign": lambda x: -x,
    "none": lambda x: 0 * x,
    "other rows": lambda x: x.roll(2, 2),
    "other columns": lambda x: x.flip(3),
    "other channels": lambda x: x.flip(1),
    "other images": lambda x: x.roll(1, 0),
}


def wrong_noise(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], how: str, bad: int
) -> Tensor:
    right = State.slice

    def wrong(self: State, whole: Tensor) -> Tensor:
        # the first slice is of the state itself, before `tokens` exists
        return right(self, WRONG_NOISE[how](whole) if hasattr(self, "tokens") and rank == bad else whole)

    State.slice = wrong  # pyright: ignore
    try:
        return run(rank, world, device, layout, Guidance(3.0), *FEW)
    finally:
        State.slice = right


@pytest.mark.parametrize(
    ("how", "world", "layout"),
    covering(WRONG_NOISE, turns=[pytest.param(2, ("ulysses", 1, 2)), pytest.param(3, ("ring", 1, 1))]),
    ids=str,
)
def test_negative_control_one_ranks_wrong_noise_is_noticed(
    ranks: Pool, world: int, layout: tuple[str, int, int], how: str
) -> None:
    """Each rank of each mesh makes some of the errors."""
    truth = alone(ranks, Guidance(3.0), *FEW)
    bad = [*WRONG_NOISE].index(how) // 2 % world
    for got in ranks.run(world, wrong_noise, layout, how, bad):
        assert (got - truth).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("world", "layout", "name"),
    [
        (1, ("ulysses", 1, 1), "EulerDiscreteScheduler"),
        (2, ("ulysses", 1, 1), "DPMSolverMultistepScheduler"),
        (3, ("kv_gather", 1, 1), "EulerAncestralDiscreteScheduler"),
        (4, ("usp", 2, 1), "DPMSolverMultistepScheduler"),
        (4, ("usp", 2, 1), "EulerAncestralDiscreteScheduler"),
    ],
    ids=str,
)
def test_any_other_scheduler_is_the_same_on_every_mesh(
    ranks: Pool, name: str, world: int, layout: tuple[str, int, int]
) -> None:
    truth = alone(ranks, Guidance(3.0), 3, (8, 8), name)
    for got in ranks.run(world, run, layout, Guidance(3.0), 3, (8, 8), name):
        assert (got - truth).abs().max() < TOLERANCE * truth.abs().max()
    if "Ancestral" not in name:
        by = by_hand(noise(), STEPS, Guidance(3.0), scheduler(name))
        assert (truth - by).abs().max() < 1e-4 * by.abs().max()


def swapped_branches(rank: int, world: int, device: torch.device) -> Tensor:
    right = Run._parted
    Run._parted = lambda self, name, out: right(self, name, out)[::-1]  # pyright: ignore
    try:
        return run(rank, world, device, ("ulysses", 2, 1), Guidance(3.0))
    finally:
        Run._parted = right


def test_negative_control_swapped_guidance_branches_are_noticed(ranks: Pool) -> None:
    truth = alone(ranks, Guidance(3.0))
    for got in ranks.run(2, swapped_branches):
        assert (got - truth).abs().max() > 1e-2


def test_modulation_in_chunks_of_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(0, 1, torch.device("cpu"), ("ulysses", 1, 1), Guidance(3.0))
    rows = 3 * (3 * 6 + 2) * 24 * 8  # bytes: distinct labels (two and null) x modulation of one row
    monkeypatch.setattr("seqpar.loop.run.TABLE_BYTES", 2 * rows + 1)
    made = []
    modulate = DistributedDiT(diffusers_dit(), Mesh.single()).model.__class__.modulate
    monkeypatch.setattr(
        "seqpar.loop.models.dit.Model.modulate", lambda self, t, **y: made.append(len(t)) or modulate(self, t, **y)
    )
    chunked = run(0, 1, torch.device("cpu"), ("ulysses", 1, 1), Guidance(3.0))
    assert made[1:] == [6, 6]  # two steps x three labels each; the first row only measures the size
    assert (chunked - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("world", [1, 2])
def test_latents_that_stop_being_finite_are_reported_with_their_step(ranks: Pool, world: int) -> None:
    for message in ranks.run(world, not_finite):
        assert "stopped being finite at step 3 of 4 (timestep 250)" in message


def not_finite(rank: int, world: int, device: torch.device) -> str:
    dit = DistributedDiT(diffusers_dit().to(device), make_mesh(device, cfg=1), "ulysses", local(device))
    inner, calls = dit.model.forward_tokens, []

    def breaks_at_third(*args: object) -> dict[str, Tensor]:
        calls.append(1)
        out = inner(*args)  # pyright: ignore
        if len(calls) == 3 and rank == world - 1:
            out["image"].fill_(float("nan"))
        return out

    dit.model.forward_tokens = breaks_at_third  # pyright: ignore
    try:
        sample(
            dit,
            scheduler(),
            noise().to(device),
            {"class_labels": torch.tensor(LABELS)},
            steps=STEPS,
            guidance=Guidance(3.0),
        )
    except FloatingPointError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guidance": Guidance(1.0), "cfg": 2}, r"got cfg=2 with guidance 1\.0, expected guidance > 1"),
        ({"guidance": Guidance(3.0, 9)}, "got guidance on 9 channels, expected 1 to 4"),
        ({"shape": (3, 5, 8, 8)}, r"got noise of shape \(3, 5, 8, 8\), expected \(N, 4, H, W\)"),
        ({"data": 2, "shape": (1, 4, 8, 8)}, r"got 1 image\(s\) for data=2"),
        ({"labels": {}}, r"got prompt \[\], expected \['class_labels'\]"),
    ],
    ids=["cfg", "channels", "noise", "data", "labels"],
)
def test_a_run_that_cannot_be_is_refused(ranks: Pool, change: dict[str, object], message: str) -> None:
    world = 2 if {"cfg", "data"} & set(change) else 1
    import re

    for text in ranks.run(world, refused, change):
        assert re.search(message, text)


def refused(rank: int, world: int, device: torch.device, change: dict[str, Any]) -> str:
    mesh = make_mesh(device, cfg=change.get("cfg", 1), data=change.get("data", 1))
    dit = DistributedDiT(diffusers_dit().to(device), mesh, local=local(device))
    shape = change.get("shape", (3, 4, 8, 8))
    labels = change.get("labels", {"class_labels": torch.zeros(shape[0], dtype=torch.int64)})
    try:
        guidance = change.get("guidance", Guidance(1.0))
        begin(dit, Request(scheduler(), torch.zeros(shape), labels, steps=1, guidance=guidance))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_guidance_that_is_no_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        Guidance(scale)


def test_a_run_never_writes_into_the_callers_noise() -> None:
    """With one token the patches are a view of the picture."""
    dit = DistributedDiT(diffusers_dit(), Mesh.single())
    start = draw_noise((1, 4, 2, 2), torch.Generator().manual_seed(2)).double()
    before = start.clone()
    for name in ("DDIMScheduler", "EulerDiscreteScheduler"):
        labels = {"class_labels": torch.tensor([3])}
        sample(dit, scheduler(name), start, labels, steps=STEPS, guidance=Guidance(1.0))
        assert torch.equal(start, before)
