"""Tests that a sharded DiT equals diffusers' unsharded one in fp64: every strategy, uneven sizes, the cfg axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.transports.collective import gather
from tests.support.meshes import LAYOUTS, mesh_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

TOLERANCE = 1e-10  # fp64, three layers, outputs of a few units


def latents(batch: int, size: tuple[int, int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    t = torch.tensor([960, 500, 3, 960, 7])[:batch].to(device)
    return random((batch, 4, *size), 1, device), t, torch.tensor([2, 10, 7, 3, 1])[:batch].to(device)


def oracle(batch: int, size: tuple[int, int], device: str) -> Tensor:
    """Return diffusers' prediction on the same kind of device: its fp32 sinusoids differ between CPUs and GPUs."""
    x, t, y = latents(batch, size, device)
    return diffusers_dit().to(device)(x, timestep=t, class_labels=y).sample.cpu()


def local(device: torch.device) -> str:
    return "auto" if device.type == "cpu" else "reference"


def sharded(mesh: Mesh, strategy: str = "ulysses") -> DistributedDiT:
    return DistributedDiT(diffusers_dit().to(mesh.device), mesh, strategy, local(mesh.device))


def forward(
    rank: int,
    world: int,
    device: torch.device,
    strategy: str,
    batch: int,
    size: tuple[int, int],
    axes: dict[str, int] | None = None,
) -> Tensor:
    """Return a call's result; buffers made in inference mode serve outside of it, too."""
    dit = sharded(make_mesh(device, **axes) if axes else mesh_for(strategy, world, device), strategy)
    x, t, y = latents(batch, size, device)
    with torch.inference_mode():
        first = dit(x, timestep=t, class_labels=y).sample.clone()
    assert batch > 1 or torch.equal(first, dit(x, timestep=960, class_labels=y).sample)  # one number for all rows
    again = dit(x, timestep=t, class_labels=y).sample
    assert torch.equal(first, again)
    return again


# batch rows and sizes of latents: 9, 15 or 16 tokens, which do not divide by the ranks, like the three heads
SIZES = [pytest.param(*case) for case in ((1, (8, 8)), (3, (6, 6)), (2, (10, 6)))]


@pytest.mark.parametrize(
    ("world", "strategy", "batch", "size"),
    [*covering((2, 3, 4), LAYOUTS, turns=SIZES), *covering((1,), ("ulysses",), turns=SIZES)],
    ids=str,
)
def test_sharded_dit_equals_diffusers(
    ranks: Pool, world: int, strategy: str, batch: int, size: tuple[int, int]
) -> None:
    if size[0] != size[1]:  # diffusers supports square latents only, so our single rank is the oracle
        truth = ranks.run(1, forward, "ulysses", batch, size)[0]
    else:
        truth = oracle(batch, size, ranks.device)
    for got in ranks.run(world, forward, strategy, batch, size):
        assert (got - truth).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("world", "axes", "batch"),
    [
        *((world, {"cfg": 2}, 3) for world in (2, 4)),
        *((2, {"cfg": 2}, 1), (3, {"cfg": 1, "data": 3}, 1), (3, {"cfg": 1, "data": 3}, 2)),
        *((4, {"cfg": 2, "data": 2}, 3), (4, {"cfg": 2, "data": 2}, 5)),
    ],
    ids=str,
)
def test_cfg_and_data_axes_split_the_batch(ranks: Pool, world: int, axes: dict[str, int], batch: int) -> None:
    truth = oracle(batch, (8, 8), ranks.device)
    for got in ranks.run(world, forward, "ulysses", batch, (8, 8), axes):
        assert got.shape == truth.shape
        assert (got - truth).abs().max() < TOLERANCE


def planned(rank: int, world: int, device: torch.device) -> tuple[str, Tensor]:
    dit = DistributedDiT(diffusers_dit().to(device), local=local(device))
    x, t, y = latents(1, (8, 8), device)
    return str(dit.mesh), dit(x, timestep=t, class_labels=y).sample


def test_a_planned_mesh_takes_a_batch_of_one(ranks: Pool) -> None:
    for mesh, got in ranks.run(2, planned):
        assert mesh == "cfg 2"
        assert (got - oracle(1, (8, 8), ranks.device)).abs().max() < TOLERANCE


def rows_of(rank: int, world: int, device: torch.device) -> list[str]:
    """What calls say whose inputs do not have a row an image; each rank would compute another part of the batch."""
    dit = sharded(make_mesh(device, cfg=2))
    x, t, y = latents(3, (8, 8), device)
    said = []
    for given in ((x, t, y[:1]), (x, t[:2], y), (x, t, y[:0]), (x[:0], t[:0], y[:0])):
        with pytest.raises(ValueError, match="one per image") as raised:
            dit(given[0], timestep=given[1], class_labels=given[2])
        said.append(str(raised.value))
    return said


def test_inputs_without_a_row_an_image_are_one_error_on_every_rank(ranks: Pool) -> None:
    first, second = ranks.run(2, rows_of)
    assert first == second
    assert first[0] == "got class_labels of shape (1,), expected 3 rows, one per image"


def dropped_shard(rank: int, world: int, device: torch.device) -> Tensor:
    dit = sharded(make_mesh(device, cfg=1))
    x, t, y = latents(2, (8, 8), device)
    inner = dit.model.forward_tokens

    def lossy(streams, positions, conditioning, attend):
        tokens = streams["image"] * (0.0 if rank == world - 1 else 1.0)
        return inner({"image": tokens}, positions, conditioning, attend)

    dit.model.forward_tokens = lossy
    return dit(x, timestep=t, class_labels=y).sample


def shifted_positions(rank: int, world: int, device: torch.device) -> Tensor:
    dit = sharded(make_mesh(device, cfg=1))
    x, t, y = latents(2, (8, 8), device)
    model: Any = dit.model
    inner = model.positions
    model.positions = lambda *size: inner(*size).roll(1, 0)
    return dit(x, timestep=t, class_labels=y).sample


@pytest.mark.parametrize("wrong", [dropped_shard, shifted_positions])
def test_negative_control_is_noticed(ranks: Pool, wrong) -> None:
    truth = oracle(2, (8, 8), ranks.device)
    for got in ranks.run(2, wrong):
        assert (got - truth).abs().max() > 1e-3


def test_call_says_what_is_wrong() -> None:
    dit = DistributedDiT(diffusers_dit(), Mesh.single())
    x, t, y = latents(1, (8, 8))
    assert dit(x, timestep=960, class_labels=y, return_dict=False)[0].shape == (1, 8, 8, 8)
    with pytest.raises(ValueError, match=r"got hidden_states of shape \(1, 3, 8, 8\), expected \(B, 4, H, W\)"):
        dit(x[:, :3], timestep=t, class_labels=y)
    with pytest.raises(ValueError, match="multiples of the patch size 2"):
        dit(x[:, :, :7], timestep=t, class_labels=y)
    with pytest.raises(ValueError, match="expected timestep, class_labels"):
        dit(x, timestep=t)
    with pytest.raises(ValueError, match="attention_mask"):
        dit(x, timestep=t, class_labels=y, attention_mask=y)
    with pytest.raises(ValueError, match="a sharded model supports inference only"):
        dit(x.requires_grad_(), timestep=t, class_labels=y)
    with pytest.raises(ValueError, match=f"got strategy 'uliss', expected one of {', '.join(sorted(LAYOUTS))}"):
        DistributedDiT(diffusers_dit(), Mesh.single(), "uliss")
    with pytest.raises(ValueError, match="got dtype='bf16', expected one of"):
        DistributedDiT(diffusers_dit(), Mesh.single(), dtype="bf16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got dtype=torch\.float64 for a Model with weights"):
        DistributedDiT(dit.model, Mesh.single(), dtype=torch.float64)


def chosen(rank: int, world: int, device: torch.device, ring: int, heads: int) -> tuple[str, str]:
    mesh = make_mesh(device, cfg=1, ring=ring)
    dit = DistributedDiT(diffusers_dit(num_attention_heads=heads).to(device), mesh, local=local(device))
    return dit.strategy.name, dit.strategy.why


@pytest.mark.parametrize(
    ("ring", "heads", "name"), [(1, 4, "ulysses"), (1, 3, "kv_gather"), (4, 4, "ring"), (2, 4, "usp")]
)
def test_auto_strategy_follows_mesh_and_heads(ranks: Pool, ring: int, heads: int, name: str) -> None:
    answers = ranks.run(4, chosen, ring, heads)
    assert {answer[0] for answer in answers} == {name}
    assert all(answer[1] for answer in answers)


def loop_and_calls(rank: int, world: int, device: torch.device) -> None:
    """Our loop and a call share exchange buffers."""
    dit = sharded(make_mesh(device, cfg=1))
    x, t, y = latents(2, (8, 8), device)
    scheduler = DDIMScheduler(clip_sample=False)

    def loop() -> None:
        result = sample(dit, scheduler, x, {"class_labels": y}, steps=2, guidance=Guidance(1.0))
        result *= 2

    def call() -> None:
        dit(x, timestep=t, class_labels=y).sample.mul_(2)

    for step in (loop, call, loop):
        step()


def test_our_loop_and_a_call_may_follow_each_other(ranks: Pool) -> None:
    ranks.run(2, loop_and_calls)


def by_hand(rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Step a run by hand and return its tokens, a prediction for them, and the latents."""
    dit = sharded(make_mesh(device, cfg=1))
    x, _, y = latents(2, (8, 8), device)
    request = Request(DDIMScheduler(clip_sample=False), x, {"class_labels": y}, steps=2, guidance=Guidance(1.0))
    run = begin(dit, request)
    prediction = run.predict()["image"]
    assert run.tokens.shape == prediction.shape == (2, 8, 16)
    whole = gather(prediction, dit.mesh.sequence, Shard(16, world).sizes, dim=1)
    return run.latents()["image"], dit.model.unpatchify(whole, 8, 8)


def test_a_run_predicts_from_its_first_moment(ranks: Pool) -> None:
    x, _, y = latents(2, (8, 8))
    where = torch.device(ranks.device)
    truth = (
        diffusers_dit()
        .to(where)(x.to(where), timestep=torch.tensor([500, 500], device=where), class_labels=y.to(where))
        .sample[:, :4]
    )
    for state, prediction in ranks.run(2, by_hand):
        assert torch.equal(state, x)
        assert (prediction - truth.cpu()).abs().max() < TOLERANCE
