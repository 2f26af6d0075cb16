"""Tests that all ranks use rank 0's inputs, whatever the other ranks pass."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Mesh, Sampler
from seqpar.loop.loop import draw_noise
from seqpar.mesh.inputs import CALL, _difference, from_rank_0
from seqpar.mesh.watch import LostRankError
from seqpar.pipelines.classes import BUILTIN
from seqpar.vae.shared import User, share
from tests.graphs.test_distributed import latents, local
from tests.loop.test_sampling import STEPS, scheduler
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit, shared_dit

CLOSE = 1e-9
CASE = ("other", "world", "layout")
# world, (strategy, cfg, data)
LAYOUTS = [pytest.param(*case) for case in ((2, ("ulysses", 1, 1)), (3, ("ring", 1, 1)), (4, ("ulysses", 2, 2)))]


def tensors(rank: int, world: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return the tensors that this rank passes, of many dtypes and shapes, and those it gets from rank 0."""
    generator = torch.Generator().manual_seed(rank)
    given = {
        "flags": torch.rand(3, generator=generator) > 0.5,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(rank, dtype=torch.int64),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "strided": torch.randn(4, 3, generator=generator, dtype=torch.float64).t().to(device),
    }
    got = from_rank_0(make_mesh(device, cfg=1), given)
    return [given, {name: x.clone() for name, x in got.items()}]


def test_a_buffer_carries_rank_0s_tensors_bit_by_bit(ranks: Pool) -> None:
    answers = ranks.run(3, tensors)
    first = answers[0][0]
    for given, got in answers:
        assert {name: (x.shape, x.dtype) for name, x in got.items()} == {
            name: (x.shape, x.dtype) for name, x in given.items()
        }
        assert all(torch.equal(x, first[name]) for name, x in got.items())
    assert not torch.equal(answers[1][0]["strided"], first["strided"])


def calls(rank: int, world: int, device: torch.device, layout: tuple[str, int, int], other: str) -> list[Tensor]:
    """Return the results of three calls of one shape; `other` names the input that differs between ranks."""
    strategy, cfg, data = layout
    dit = DistributedDiT(shared_dit(device), mesh_for(strategy, world, device, cfg, data), strategy, local(device))
    x, t, y = (torch.cat((z, z))[:4] for z in latents(3, (8, 8), device))
    found = []
    for index in range(3):
        x_call = x * (1 + index) + (rank if other == "noise" else 0)
        t_call: Any = (t + (rank if other == "timesteps" else 0)) % 1000
        y_call = (y + (rank if other == "labels" else 0)) % 10
        found.append(dit(x_call, timestep=t_call, class_labels=y_call).sample)
    return found


@pytest.mark.parametrize(CASE, covering(["noise", "timesteps", "labels"], turns=LAYOUTS), ids=str)
def test_every_call_of_a_model_takes_rank_0s_inputs(
    ranks: Pool, world: int, layout: tuple[str, int, int], other: str
) -> None:
    truth = ranks.run(1, calls, ("ulysses", 1, 1), other)[0]
    for found in ranks.run(world, calls, layout, other):
        for got, wanted in zip(found, truth, strict=True):
            assert (got - wanted).abs().max() < CLOSE


def runs(rank: int, world: int, device: torch.device, layout: tuple[str, int, int], other: str) -> list[Tensor]:
    """Return the latents of two runs with noise in every step; `other` names the input that differs between ranks."""
    strategy, cfg, data = layout
    dit = DistributedDiT(shared_dit(device), mesh_for(strategy, world, device, cfg, data), strategy, local(device))
    mine = {name: rank * (name == other) for name in ("noise", "labels", "guidance", "eta", "generator", "kept")}
    found = []
    with Sampler(dit) as sampler:
        for seed in range(2):
            noise = draw_noise((3, 4, 6, 6), torch.Generator().manual_seed(seed + 10 * mine["noise"]))
            labels = (torch.tensor([3, 7, 3]) + mine["labels"]) % 10
            generator = torch.Generator().manual_seed(5 + mine["generator"])
            found.append(
                sampler(
                    scheduler(),
                    noise,
                    {"class_labels": labels},
                    steps=STEPS,
                    guidance=Guidance(3.0 + mine["guidance"]),
                    eta=1.0 - 0.2 * mine["eta"],
                    generator=None if mine["generator"] > 1 else generator,
                )
            )
            if mine["kept"]:
                sampler.release()  # this rank has no kept run any more: all ranks must begin a new one
    return found


@pytest.mark.parametrize(CASE, covering(["noise", "labels", "guidance", "eta", "generator", "kept"], turns=LAYOUTS))
def test_every_run_takes_rank_0s_inputs(ranks: Pool, world: int, layout: tuple[str, int, int], other: str) -> None:
    truth = ranks.run(1, runs, ("ulysses", 1, 1), "nothing")[0]
    for found in ranks.run(world, runs, layout, other):
        for got, wanted in zip(found, truth, strict=True):
            assert (got - wanted).abs().max() < CLOSE * wanted.abs().max()


def test_a_copy_of_a_shared_decoder_decodes_with_its_own_weights() -> None:
    pipe: Any = DiTPipeline.from_pretrained(BUILTIN)
    latents, end = torch.ones(1, pipe.vae.config.latent_channels, 2, 2), share(pipe.vae, User(Mesh.single()))
    first, copied = pipe.vae.decode(latents).sample, copy.deepcopy(pipe.vae)
    assert torch.equal(copied.decode(latents).sample, first)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied.decode(latents).sample.any()
    end()
    assert torch.equal(pipe.vae.decode(latents).sample, first)
    assert not copy.deepcopy(copied).decode(latents).sample.any()


def unequal(rank: int, world: int, device: torch.device, what: str) -> list[str]:
    """Return the errors of calls and runs with inputs of unequal shapes, and whether equal inputs work afterwards."""
    dit = DistributedDiT(diffusers_dit().to(device), make_mesh(device, cfg=1), "ulysses", local(device))
    odd, said = rank == world - 1, []
    for wrong in (True, False):
        other = what if odd and wrong else ""
        size = (8, 6) if other == "shape" else (8, 8)
        dtype = torch.float64 if other == "dtype" else torch.float32
        x = draw_noise((2, 4, *size), torch.Generator().manual_seed(0)).to(dtype)
        labels: dict[str, Any] = {} if other == "labels" else {"class_labels": torch.tensor([3, 7])}
        labels |= {"class_labels": ["cat", "dog"]} if other == "words" else {}
        labels |= {"class_labels": [3, 7]} if other == "list" else {}
        sched = scheduler(beta_end=0.01 if other == "scheduler" else 0.02)
        try:
            if what in ("steps", "scheduler", "guidance", "list"):
                with Sampler(dit) as sampler:
                    guidance = Guidance(3.0, 9 if other == "guidance" else None)
                    sampler(sched, x, labels, steps=3 if other == "steps" else 2, guidance=guidance)
            else:
                dit(x.to(device), timestep=torch.tensor([5, 6]), **labels)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("what", ["shape", "dtype", "labels", "words", "list", "steps", "scheduler"])
def test_inputs_of_unequal_form_end_in_one_error_on_every_rank(ranks: Pool, what: str) -> None:
    answers = ranks.run(3, unequal, what)
    assert len({first for first, _ in answers}) == 1
    assert "on rank 2, expected" in answers[0][0] or answers[0][0].startswith("rank 2: got ")
    assert all(second == "nothing" for _, second in answers)


def test_a_value_that_only_another_rank_has_wrong_is_not_used(ranks: Pool) -> None:
    assert ranks.run(2, unequal, "guidance") == [["nothing", "nothing"]] * 2


def deserted(rank: int, world: int, device: torch.device, what: str) -> str:
    """What rank 0 is told when it makes a call alone, or when a gather fails otherwise; its group waits for 1 s."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    plain = make_mesh(device, cfg=1)
    mesh = replace(plain, world=replace(plain.world, group=group))
    if rank:
        return "nothing"
    with pytest.MonkeyPatch.context() as patch:
        if what == "a mistake":
            for name in ("all_gather_single", "all_gather_into_tensor"):
                patch.setattr(dist, name, lambda *_, **__: torch.zeros(2).view(3), raising=False)
        try:
            from_rank_0(mesh, {"x": torch.zeros(2)})
        except (TimeoutError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("an absence", "LostRankError: rank 0: timed out after 1[.0-9]* s waiting for one of ranks .0, 1. .the compar"),
        ("a mistake", "RuntimeError: shape '.3.' is invalid"),
    ],
)
def test_a_rank_that_makes_a_call_alone_is_told_what_it_waited_for(ranks: Pool, what: str, told: str) -> None:
    """And an error that has another cause is not taken for that."""
    assert re.match(told, ranks.run(2, deserted, what)[0])


def test_texts_of_a_stranger_are_told_and_never_evaluated() -> None:
    for text in ("import os", "(" * 10**5, "-" * 10**6 + "1", ""):
        assert f"rank 0 calls x, rank 1 {text}. All" in _difference([{CALL: "calls x"}, {CALL: text}])
    assert "rank 1 makes another call" in _difference([{CALL: "calls x"}, {}])
    with pytest.raises(LostRankError, match=r"digests of inputs differ .*another process took the place of a rank"):
        _difference([{"x": "1"}] * 3)
