"""Tests of the loop against diffusers' model and schedulers in one process: guidance, any scheduler, every mesh."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

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
from tests.support.original import exact
from tests.support.pool import Pool
from tests.support.tiny import CLASSES, diffusers_dit, shared_dit

pytestmark = pytest.mark.slow

STEPS, LABELS = 4, [3, 7, 3]
LINEAR = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
TOLERANCE = 1e-9  # of fp64
GUIDED = Guidance(3.0)
Layout = tuple[str, int, int]  # strategy, cfg, data
ALONE: Layout = ("ulysses", 1, 1)


def scheduler(name: str = "DDIMScheduler", **config: Any) -> Any:
    """A scheduler with the betas of the tests' model, if it has betas."""
    kind, config = getattr(diffusers, name), LINEAR | ({"clip_sample": False} if "DDIM" in name else {}) | config
    known = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in config.items() if key in known})


@dataclass(frozen=True)
class Case:
    """A run. options: further settings of `sample`. exact: tables of the scheduler in fp64. layers: of the model."""

    name: str = "DDIMScheduler"
    config: tuple[tuple[str, Any], ...] = ()
    guidance: Guidance = GUIDED
    options: tuple[tuple[str, Any], ...] = ()
    images: int = 3
    size: tuple[int, int] = (8, 8)
    steps: int = STEPS
    exact: bool = False
    layers: int = 3
    dtype: torch.dtype = torch.float64
    seed: int = 2

    def scheduler(self) -> Any:
        made = scheduler(self.name, **dict(self.config))
        return exact(made) if self.exact else made

    def noise(self) -> Tensor:
        return draw_noise((self.images, 4, *self.size), torch.Generator().manual_seed(self.seed)).to(self.dtype)


def guided(model: nn.Module, x: Tensor, t: Any, labels: Tensor, guidance: Guidance) -> Tensor:
    """The output of diffusers' model: the first channels are guided, the others conditional."""
    when = torch.as_tensor(t).to(x.device).expand(len(x))
    c, u = (model(x, timestep=when, class_labels=y).sample for y in (labels, torch.full_like(labels, CLASSES)))
    channels, scale = guidance.channels or 4, guidance.scale
    mixed = u[:, :channels] + scale * (c - u)[:, :channels] if guidance.on else c[:, :channels]
    return torch.cat((mixed, c[:, channels:]), dim=1)


@cache
def by_diffusers(case: Case) -> list[Any]:
    """What the scheduler returns at each step of diffusers' model in one process."""
    model, made, options = diffusers_dit(num_layers=case.layers), case.scheduler(), dict(case.options)
    model = model.to(DEVICE, case.dtype)
    # LTX alone computes with its sigmas on the latents' device, the others with numbers
    made.set_timesteps(case.steps, **({"device": DEVICE} if "LTX" in case.name else {}))
    x = case.noise().to(DEVICE) * float(getattr(made, "init_noise_sigma", 1.0))
    labels, outputs = torch.tensor(LABELS[: case.images], device=DEVICE), []
    if "generator" in inspect.signature(made.step).parameters:
        options["generator"] = torch.Generator().manual_seed(5)
    learned = made.config.get("variance_type") == "learned_range"
    for t in made.timesteps:
        seen = made.scale_model_input(x, t) if hasattr(made, "scale_model_input") else x
        out = guided(model, seen.to(case.dtype), t, labels, case.guidance)
        outputs.append(made.step(out if learned else out[:, :4], t, x, **options))
        x = outputs[-1].prev_sample
    return outputs


def engine(world: int, device: torch.device, layout: Layout, case: Case, transport: str = "auto") -> DistributedDiT:
    whole = case.dtype == torch.float64
    model = shared_dit(device, case.layers) if whole else diffusers_dit(num_layers=case.layers).to(device, case.dtype)
    return DistributedDiT(model, mesh_for(layout[0], world, device, *layout[1:]), layout[0], local(device), transport)


def settings(case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {"steps": case.steps, "guidance": case.guidance, "generator": generator, **dict(case.options)}


def sampled(rank: int, world: int, device: torch.device, *rows: tuple[Layout, Case]) -> list[Tensor]:
    """The latents of each row: a layout and a case, by either transport in turn."""
    found = []
    for (layout, case), transport in zip(rows, cycle(("collective", "peer"))):
        dit, labels = (
            engine(world, device, layout, case, transport),
            {"class_labels": torch.tensor(LABELS[: case.images])},
        )
        found.append(sample(dit, case.scheduler(), case.noise(), labels, **settings(case)).cpu())
    return found


def afresh(case: Case) -> Tensor:
    """What one rank samples, computed again."""
    return sampled(0, 1, torch.device(DEVICE), (ALONE, case))[0]


alone = cache(afresh)


def off(got: Tensor, truth: Tensor) -> float:
    return float((got.cpu().double() - truth.cpu().double()).norm() / truth.cpu().double().norm())


# One rank against diffusers ------------------------------------------------------------------------------------------

# diffusers' solvers take other last steps in runs below 15; these rows are about steps, so the model has two blocks
LONG = Case(images=2, steps=16, layers=2)
FLOW = (("prediction_type", "flow_prediction"), ("use_flow_sigmas", True))
NAMED: dict[str, Case] = {
    "DPM++ 2M": replace(LONG, name="DPMSolverMultistepScheduler"),
    "DPM++ 2M Karras": replace(LONG, name="DPMSolverMultistepScheduler", config=(("use_karras_sigmas", True),)),
    "DPM++ 2M flow": replace(LONG, name="DPMSolverMultistepScheduler", config=FLOW),
    "UniPC": replace(LONG, name="UniPCMultistepScheduler"),
    "UniPC flow": replace(LONG, name="UniPCMultistepScheduler", config=FLOW),
    "Euler": replace(LONG, name="EulerDiscreteScheduler"),
    "Heun": replace(LONG, name="HeunDiscreteScheduler"),
    "FlowMatchEuler": replace(LONG, name="FlowMatchEulerDiscreteScheduler", config=(("shift", 3.0),)),
    "DEIS": replace(LONG, name="DEISMultistepScheduler"),
}
SDE = (("algorithm_type", "sde-dpmsolver++"),)
STOCHASTIC = (("stochastic_sampling", True),)
NOISY: dict[str, Case] = {
    "SDE-DPM++ 2M": replace(LONG, name="DPMSolverMultistepScheduler", config=SDE),
    "Euler ancestral": replace(LONG, name="EulerAncestralDiscreteScheduler"),
    "KDPM2 ancestral": replace(LONG, name="KDPM2AncestralDiscreteScheduler"),
    "DDPM": replace(LONG, name="DDPMScheduler", config=(("clip_sample", False),)),
    "LCM": replace(LONG, name="LCMScheduler", config=(("clip_sample", False),)),
    "TCD": replace(LONG, name="TCDScheduler"),  # its default eta is 0.3
    "SA-Solver": replace(LONG, name="SASolverScheduler"),
    # these make the state fp32 before they draw like it
    "FlowMatchEuler stochastic": replace(LONG, name="FlowMatchEulerDiscreteScheduler", config=STOCHASTIC),
    "LTX ancestral": replace(LONG, name="LTXEulerAncestralRFScheduler"),
}
WHOLE: dict[str, Case] = {
    "PNDM": replace(LONG, name="PNDMScheduler"),
    "DPM++ thresholds": replace(LONG, name="DPMSolverMultistepScheduler", config=(("thresholding", True),)),
}
SOME = Guidance(3.0, 3)
GUIDANCES = {"alone": Guidance(1.0), "guided": Guidance(3.0), "channels": SOME}
LEARNED = Case("DDPMScheduler", (("variance_type", "learned_range"), ("clip_sample", False)), SOME, images=2, steps=5)
LEARNED = replace(LEARNED, exact=True)
CLIP = (("clip_sample", True), ("clip_sample_range", 0.5))


# row -> (case, largest error, a case whose latents are others or None); tables of diffusers that are not exact are fp32
TRUTHS: dict[str, tuple[Case, float, Case | None]] = {
    **{
        f"DDIM {name} {eta}": (Case(guidance=how, options=(("eta", eta),), exact=True), TOLERANCE, None)
        for name, how in GUIDANCES.items()
        for eta in (0.0, 1.0)
    },
    **{
        f"DDIM clipped {eta} {clipped}": (
            Case(config=CLIP, guidance=Guidance(1.0), options=(("eta", eta), ("use_clipped_model_output", clipped))),
            1e-5,
            Case(guidance=Guidance(1.0), options=(("eta", eta),)),
        )
        for eta in (0.0, 0.7)
        for clipped in (False, True)
    },
    "DDIM drawn fp64": (replace(LONG, options=(("eta", 0.7),)), 3e-6, LONG),
    "DDIM drawn fp32": (replace(LONG, options=(("eta", 0.7),), dtype=torch.float32), 3e-6, LONG),
    # an offset, so that the last step adds noise, too, and clipping
    **{
        f"learned {kind}": (
            replace(LEARNED, config=(*LEARNED.config[:1], *CLIP, ("prediction_type", kind), ("steps_offset", 1))),
            TOLERANCE,
            LEARNED,
        )
        for kind in ("epsilon", "v_prediction", "sample")
    },
    **{f"learned {name}": (replace(LEARNED, guidance=how), TOLERANCE, None) for name, how in GUIDANCES.items()},
    **{name: (case, 1e-6, None) for name, case in (NAMED | NOISY).items()},
    # random draws depend on the dtype, so fp32 is compared with fp32
    **{
        f"{name} fp32": (replace(case, dtype=torch.float32), 3e-6, None)
        for name, case in NOISY.items()
        if name != "KDPM2 ancestral"  # which draws as Euler does, and takes a second
    },
    # steps of which each rank computes all
    **{name: (case, 1e-6, None) for name, case in WHOLE.items()},
    "TCD default eta": (NOISY["TCD"], 1e-6, replace(NOISY["TCD"], options=(("eta", 0.0),))),
}


@pytest.mark.parametrize("row", TRUTHS)
def test_one_rank_computes_what_diffusers_does(row: str) -> None:
    case, tolerance, other = TRUTHS[row]
    truth = by_diffusers(case)[-1].prev_sample
    assert off(alone(case), truth) <= tolerance
    if other is not None:
        assert off(truth, by_diffusers(other)[-1].prev_sample) > 1e-2


def test_in_fp32_steps_and_model_are_as_near_to_fp64_as_diffusers() -> None:
    """Over several noises: of one noise the two errors are 0.7 to 1.3 times each other, by luck."""
    ours, theirs = [], []
    for seed in range(6):
        case = replace(NAMED["DPM++ 2M"], seed=seed)
        truth, narrow = afresh(case), replace(case, dtype=torch.float32)
        ours.append(off(afresh(narrow), truth))
        theirs.append(off(by_diffusers(narrow)[-1].prev_sample, truth))
    assert torch.tensor(ours).norm() <= 1.25 * torch.tensor(theirs).norm()


# Every mesh against one rank -----------------------------------------------------------------------------------------

MESHES: list[tuple[int, Layout]] = [
    *((2, layout) for layout in (("ulysses", 1, 1), ("ulysses", 2, 1), ("ring", 1, 1), ("ulysses", 1, 2))),
    *((3, layout) for layout in (("ulysses", 1, 1), ("kv_gather", 1, 1), ("ring", 1, 1))),
    *((4, layout) for layout in (("usp", 1, 1), ("ulysses", 2, 1), ("ulysses", 2, 2), ("kv_gather", 2, 1))),
    (4, ("ulysses", 1, 1)),
]
UNEVEN = Case(size=(6, 10))  # 15 tokens
STILL, DRAWN = (replace(UNEVEN, options=(("eta", eta),)) for eta in (0.0, 0.7))
REPLICATED = replace(DRAWN, config=(("thresholding", True),))
OTHERS = [Case(name) for name in ("DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler")]
# guidance on some channels with 1 to 3 images is the most general, and has every mesh; the others have some
ROWS: list[tuple[int, Layout, Case]] = [
    *((*mesh, replace(UNEVEN, guidance=SOME, images=max(mesh[1][2], 1 + i % 3))) for i, mesh in enumerate(MESHES)),
    *((*mesh, Case()) for mesh in MESHES if mesh[1][1] == 2),
    *((*mesh, replace(UNEVEN, guidance=Guidance(1.0))) for mesh in MESHES[2:9:3] if mesh[1][1] == 1),
    *((*mesh, DRAWN) for mesh in MESHES[::2]),
    *((*mesh, REPLICATED) for mesh in MESHES[::3]),
    (2, ALONE, OTHERS[0]),
    (3, ("kv_gather", 1, 1), OTHERS[1]),
    *((4, ("usp", 2, 1), case) for case in OTHERS),
    *((3, ("kv_gather", 1, 1), NAMED[name]) for name in ("UniPC", "Heun")),
    (3, ("kv_gather", 1, 1), NOISY["SDE-DPM++ 2M"]),
    # of which test_original.py compares bits
    *((*mesh, LEARNED) for mesh in MESHES[::4]),
    (*MESHES[5], replace(LEARNED, guidance=Guidance(1.0))),
    *((*mesh, LEARNED) for mesh in (MESHES[5], MESHES[9])),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sampling_is_the_same_on_every_mesh(ranks: Pool, world: int) -> None:
    rows = [(layout, case) for size, layout, case in ROWS if size == world]
    for found in ranks.run(world, sampled, *rows):
        for (layout, case), got in zip(rows, found, strict=True):
            truth = alone(case)
            assert (got - truth).abs().max() < TOLERANCE * truth.abs().max(), (layout, case)


def test_negative_control_noise_changes_the_latents() -> None:
    assert (alone(DRAWN) - alone(STILL)).abs().max() > 1e-2


# errors that one rank makes with its part of a step's noise
WRONG_NOISE = {
    "sign": lambda x: -x,
    "none": lambda x: 0 * x,
    "other rows": lambda x: x.roll(2, 2),
    "other columns": lambda x: x.flip(3),
    "other channels": lambda x: x.flip(1),
    "other images": lambda x: x.roll(1, 0),
}


def wrong_noise(rank: int, world: int, device: torch.device, layout: Layout) -> list[Tensor]:
    """The latents with each of the errors, which the ranks make in turn."""
    right, found = State.slice, []
    for index, how in enumerate(WRONG_NOISE.values()):

        def wrong(self: State, whole: Tensor, how: Any = how, index: int = index) -> Tensor:
            # the first slice is of the state itself, before `tokens` exists
            return right(self, how(whole) if hasattr(self, "tokens") and rank == index // 2 % world else whole)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(State, "slice", wrong)
            found += sampled(rank, world, device, (layout, replace(DRAWN, steps=2)))
    return found


@pytest.mark.parametrize(("world", "layout"), [(2, ("ulysses", 1, 2)), (3, ("ring", 1, 1))], ids=str)
def test_negative_control_one_ranks_wrong_noise_is_noticed(ranks: Pool, world: int, layout: Layout) -> None:
    truth = alone(replace(DRAWN, steps=2))
    for found in ranks.run(world, wrong_noise, layout):
        for how, got in zip(WRONG_NOISE, found, strict=True):
            assert (got - truth).abs().max() > 1e-2, how


def swapped_branches(rank: int, world: int, device: torch.device) -> Tensor:
    right = Run._parted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_parted", lambda self, name, out: right(self, name, out)[::-1])
        return sampled(rank, world, device, (("ulysses", 2, 1), Case()))[0]


def test_negative_control_swapped_guidance_branches_are_noticed(ranks: Pool) -> None:
    for got in ranks.run(2, swapped_branches):
        assert (got - alone(Case())).abs().max() > 1e-2


# One run -------------------------------------------------------------------------------------------------------------


def test_modulation_in_chunks_of_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, counts = alone(Case()), []
    rows = 3 * (3 * 6 + 2) * 24 * 8  # bytes: distinct labels (two and null) x modulation of one row
    monkeypatch.setattr("seqpar.loop.run.TABLE_BYTES", 2 * rows + 1)
    modulate = shared_dit(torch.device(DEVICE)).__class__.modulate
    monkeypatch.setattr(
        "seqpar.loop.models.dit.Model.modulate", lambda self, t, **y: counts.append(len(t)) or modulate(self, t, **y)
    )
    assert (afresh(Case()) - whole).abs().max() < TOLERANCE
    assert counts[1:] == [6, 6]  # two steps x three labels each; the first row only measures the size


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
    with pytest.raises(FloatingPointError) as raised:
        sample(dit, scheduler(), Case().noise(), {"class_labels": torch.tensor(LABELS)}, **settings(Case()))
    return str(raised.value)


@pytest.mark.parametrize("world", [1, 2])
def test_latents_that_stop_being_finite_are_reported_with_their_step(ranks: Pool, world: int) -> None:
    for message in ranks.run(world, not_finite):
        assert "stopped being finite at step 3 of 4 (timestep 250)" in message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guidance": Guidance(1.0), "cfg": 2}, r"got cfg=2 with guidance 1\.0, expected guidance > 1"),
    ({"guidance": Guidance(3.0, 9)}, "got guidance on 9 channels, expected 1 to 4"),
    ({"shape": (3, 5, 8, 8)}, r"got noise of shape \(3, 5, 8, 8\), expected \(N, 4, H, W\)"),
    ({"data": 2, "shape": (1, 4, 8, 8)}, r"got 1 image\(s\) for data=2"),
    ({"labels": {}}, r"got prompt \[\], expected \['class_labels'\]"),
]


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    found = []
    for change, _ in REFUSED:
        mesh = make_mesh(device, cfg=change.get("cfg", 1), data=change.get("data", 1))
        dit, shape = DistributedDiT(shared_dit(device), mesh, local=local(device)), change.get("shape", (3, 4, 8, 8))
        labels = change.get("labels", {"class_labels": torch.zeros(shape[0], dtype=torch.int64)})
        with pytest.raises(ValueError, match="expected") as raised:
            begin(dit, Request(scheduler(), torch.zeros(shape), labels, 1, change.get("guidance", Guidance(1.0))))
        found.append(str(raised.value))
    return found


def test_a_run_that_cannot_be_is_refused(ranks: Pool) -> None:
    for found in ranks.run(2, refused):
        for (_, message), text in zip(REFUSED, found, strict=True):
            assert re.search(message, text)
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a finite number"):
            Guidance(scale)


def test_a_run_never_writes_into_the_callers_noise() -> None:
    """With one token the patches are a view of the picture."""
    dit, start = DistributedDiT(diffusers_dit(), Mesh.single()), replace(Case(), images=1, size=(2, 2)).noise()
    before = start.clone()
    for name in ("DDIMScheduler", "EulerDiscreteScheduler"):
        labels = {"class_labels": torch.tensor([3])}
        sample(dit, scheduler(name), start, labels, steps=STEPS, guidance=Guidance(1.0))
        assert torch.equal(start, before)
