"""Tests of our own models in 8 bits: their error, one rank's bits on all, and matrices that follow their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn

import seqpar
from seqpar import DistributedDiT, Guidance, sample
from seqpar.loading.random import randomise
from seqpar.loop import eight
from seqpar.loop.blueprint import locate
from seqpar.loop.interface import SequenceModel
from seqpar.loop.loop import Sampler
from seqpar.loop.models import dit, large_dit
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.calibration import Calibration
from tests.loop.models import test_large_dit as large
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, mesh_for, random
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows
from tests.support.sharded import CPU, error, raised
from tests.support.tiny import diffusers_dit, shared_dit

SIZE = (6, 10)  # 15 tokens, which do not divide by 2 or 4 ranks
ROUNDING = 0.1  # of tiny models' outputs; rounding to 3 bits costs a few percent in each GEMM
MODELS: dict[str, Callable[[], SequenceModel]] = {
    "dit": lambda: shared_dit(CPU),
    "large-dit": lambda: large.shared("released", CPU),
    "heads of 72, as in dit-xl": lambda: of_72(),
    "large-dit of groups": lambda: large.ours(replace(large.TINY, qk_norm_groups=4), CPU),
}


@cache
def of_72() -> SequenceModel:
    model = dit.Model(dit.Config(num_attention_heads=2, num_layers=1, sample_size=8, num_classes=10)).double()
    randomise(model, 0)
    for weight in model.parameters():
        weight.data *= 4  # else blocks of so few channels hardly change what they add to
    return model.requires_grad_(False)


@pytest.fixture(autouse=True)
def cached_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))


def inputs() -> dict[str, Tensor]:
    x, t, y = large.inputs(SIZE)
    return {"hidden_states": x, "timestep": t, "class_labels": y}


def called(dit: DistributedDiT) -> Tensor:
    return dit(**inputs()).sample


def in_8_bits(model: nn.Module) -> DistributedDiT:
    return DistributedDiT(model, Mesh.single(), precision="fp8")


@pytest.mark.parametrize("name", MODELS)
def test_the_error_is_that_of_rounding_above_that_of_bf16(name: str) -> None:
    truth = called(DistributedDiT(MODELS[name](), Mesh.single()))
    floor = called(DistributedDiT(narrow(name), Mesh.single()))
    assert error(floor, truth) < error(called(in_8_bits(narrow(name))), truth) < ROUNDING
    assert 1e-3 < error(called(in_8_bits(MODELS[name]())), truth) < ROUNDING


def narrow(name: str) -> SequenceModel:
    """A copy of the model in bf16."""
    model = MODELS[name]()
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.to(torch.bfloat16).requires_grad_(False)


def test_negative_control_without_a_centre_inputs_with_a_mean_lose_more() -> None:
    model = large.ours(large.TINY, CPU)
    with torch.no_grad():
        for block in model.blocks:
            shift = block.get_submodule("modulation").bias.view(6, -1)  # pyright: ignore
            shift[0] += 5
            shift[3] += 5
    truth, dit = called(DistributedDiT(model, Mesh.single())), in_8_bits(model)
    centred = error(called(dit), truth)
    dit.matrices8 = eight.Matrices8(model, Calibration())
    assert 2 * centred < error(called(dit), truth)


# One rank's bits --------------------------------------------------------------------------------------------------

TURNS = [pytest.param(*one) for one in (("dit", 2), ("large-dit", 3), ("dit", 3), ("large-dit", 4))]
ROWS: list[Any] = [case.values for case in covering(LAYOUTS, turns=TURNS)]


def results(dit: DistributedDiT) -> tuple[Tensor, Tensor]:
    """A call's result, and latents after two steps with guidance."""
    with by_rows():
        made, scheduler = called(dit).clone(), DDIMScheduler.from_config(eight.SCHEDULE)
        prompt = {"class_labels": torch.tensor([2])}
        return made, sample(dit, scheduler, random((1, 4, *SIZE), 3), prompt, steps=2, guidance=Guidance(2.0))


def sharded(rank: int, world: int, device: torch.device, folder: str) -> list[tuple[Tensor, Tensor]]:
    made = list[tuple[Tensor, Tensor]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQPAR_CACHE", folder)
        for turn, (strategy, name, size) in enumerate(ROWS):
            if size == world:
                mesh, transport = mesh_for(strategy, world, device), TRANSPORTS[turn % 2]
                dit = DistributedDiT(MODELS[name](), mesh, strategy, transport=transport, precision="fp8")
                made.append(results(dit))
    return made


@cache
def alone(name: str) -> tuple[Tensor, Tensor]:
    return results(in_8_bits(MODELS[name]()))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_has_one_ranks_bits(cpu_ranks: Pool, world: int, tmp_path: Path) -> None:
    """Strategies that only move data; others add in another order, after which few numbers round otherwise."""
    rows = [row for row in ROWS if row[2] == world]
    for made in cpu_ranks.run(world, sharded, str(tmp_path / "ranks")):
        for (strategy, name, _), pair in zip(rows, made, strict=True):
            for got, wanted in zip(pair, alone(name), strict=True):
                assert torch.equal(got, wanted) if strategy in EXACT else error(got, wanted) < 0.02, (strategy, name)


# Calibration ------------------------------------------------------------------------------------------------------


def files(rank: int, world: int, device: torch.device, folder: str) -> list[bytes]:
    """The calibrations that ranks leave in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQPAR_CACHE", folder)
        mesh = mesh_for("ulysses", world, device) if world > 1 else Mesh.single(device)
        DistributedDiT(shared_dit(device), mesh, "ulysses" if world > 1 else "auto", precision="fp8")
        mesh.on_all_ranks(lambda: None)  # rank 0 writes it
        return [path.read_bytes() for path in Path(folder).iterdir()]


def test_calibrations_are_equal_on_any_number_of_ranks(cpu_ranks: Pool, tmp_path: Path) -> None:
    (wanted,) = files(0, 1, CPU, str(tmp_path / "1"))
    for world in (2, 3):
        found, *_ = cpu_ranks.run(world, files, str(tmp_path / str(world)))
        assert found == [wanted]


def test_the_means_are_those_of_diffusers_modules_and_are_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    theirs, seen = diffusers_dit(), dict[str, list[Tensor]]()
    layers = {"qkv": "attn1.to_q", "proj": "attn1.to_out.0", "fc1": "ff.net.0.proj", "fc2": "ff.net.2"}
    for index, block in enumerate(theirs.transformer_blocks):  # pyright: ignore
        for name, path in layers.items():
            inputs = seen[f"blocks.{index}.{name}"] = []
            block.get_submodule(path).register_forward_pre_hook(
                lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, -2))
            )

    def predict(x: Tensor, timestep: Tensor, class_labels: Tensor) -> Any:
        return theirs(x.double(), timestep=timestep.expand(len(x)), class_labels=class_labels)

    eight.fixed_run(shared_dit(CPU).config, predict, CPU)
    for _ in range(2):
        dit = in_8_bits(shared_dit(CPU))
        assert dit.matrices8 is not None
        assert dit.matrices8.by_path.keys() == seen.keys()
        for key, matrix in dit.matrices8.by_path.items():
            assert len(seen[key]) == eight.STEPS
            torch.testing.assert_close(matrix.reads.centre_E, torch.cat(seen[key]).mean(0).float())
    assert capsys.readouterr().out == 2 * "seqpar: 12 of 12 GEMMs in 8 bits are centred by fixed classes\n"


def test_gemms_that_rounding_would_ruin_keep_their_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """A channel of 1e6, which the weights do not read, leaves few steps for the others."""
    model = large.ours(large.TINY, CPU)
    block = model.blocks[1]
    with torch.no_grad():
        block.get_submodule("modulation").bias.view(6, -1)[1, -1] = 1e6  # pyright: ignore
        block.get_submodule("qkv").weight[:, -1] = 0  # pyright: ignore
    truth, dit = called(DistributedDiT(model, Mesh.single())), in_8_bits(model)
    assert str(dit.matrices8) == "11 of 12 in 8 bits, 0 with fast sums"
    assert "because rounding changes them by more than 10%: model.blocks.1.qkv" in capsys.readouterr().out
    assert error(called(dit), truth) < ROUNDING


# Copies of weights ------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> SequenceModel:
    return large.ours(large.TINY, CPU)


def steps(sampler: Sampler) -> Tensor:
    scheduler, prompt = DDIMScheduler.from_config(eight.SCHEDULE), {"class_labels": torch.tensor([2])}
    return sampler(scheduler, random((1, 4, *SIZE), 3), prompt, steps=2, guidance=Guidance(2.0)).clone()


def test_weights_written_in_place_are_followed_in_the_same_memory(model: SequenceModel) -> None:
    dit, layer = in_8_bits(model), model.get_submodule("blocks.0.w2")
    assert dit.matrices8 is not None
    addresses = [(x.values.data_ptr(), x.scales.data_ptr()) for x in dit.matrices8.by_path.values()]
    with Sampler(dit) as sampler:
        before, of_steps = called(dit), steps(sampler)
        with torch.no_grad():
            layer.weight.mul_(-3)  # pyright: ignore
        followed, again = called(dit), steps(sampler)
        assert error(followed, before) > 1e-3
        assert error(again, of_steps) > 1e-3

        # what a new one computes with the same means
        known = {key: x.reads.centre_E for key, x in dit.matrices8.by_path.items()}
        fresh = in_8_bits(model)
        fresh.matrices8 = eight.Matrices8(model, Calibration({k: x for k, x in known.items() if x is not None}))
        assert torch.equal(called(fresh), followed)
        with Sampler(fresh) as other:
            assert torch.equal(steps(other), again)
    assert [(x.values.data_ptr(), x.scales.data_ptr()) for x in dit.matrices8.by_path.values()] == addresses

    # what is written through `.data` has no version: `refresh` is for it
    layer.weight.data.mul_(-3)  # pyright: ignore
    assert torch.equal(called(dit), followed)
    dit.refresh()
    assert error(called(dit), followed) > 1e-3


def test_another_engine_of_the_same_model_keeps_its_dtype(model: SequenceModel) -> None:
    plain = DistributedDiT(model, Mesh.single())
    before, eight_bits = called(plain), in_8_bits(model)
    assert error(called(eight_bits), before) > 1e-4
    assert torch.equal(called(plain), before)


# The door ---------------------------------------------------------------------------------------------------------


def test_what_cannot_compute_in_8_bits_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(what: Any, precision: Any = "fp8", **options: Any) -> str:
        return raised(lambda: DistributedDiT(what, Mesh.single(), precision=precision, **options))

    assert "got precision='int8', expected one of fp8" in refused(shared_dit(CPU), "int8")
    assert "uvit.Model has no blocks that compute in 8 bits" in refused(locate("random:unidiffuser-v0"))
    odd = large_dit.Model(replace(large.TINY, width=72, num_attention_heads=4, num_key_value_heads=4))
    assert eight.why_not(odd, CPU, torch.bfloat16) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU of a plan
    assert "a weight is (216, 72); 16 must divide both" in str(eight.why_not(odd, torch.device("cuda"), torch.bfloat16))
    assert "weights are float16" in str(eight.why_not(shared_dit(CPU), torch.device("cuda"), torch.float16))
    assert eight.why_not(locate("random:dit-xl/2").meta(), torch.device("cuda"), torch.bfloat16) is None
    dit = in_8_bits(shared_dit(CPU))
    settings: Any = {"steps": 2, "guidance": Guidance(2.0)}
    noise, prompt = random((1, 4, *SIZE), 3), {"class_labels": torch.tensor([2])}
    run = DDIMScheduler.from_config(eight.SCHEDULE), noise, prompt
    assert "the model computes in 8 bits" in raised(lambda: seqpar.verify(dit, *run, **settings))
