"""Tests on GPUs: sharded bf16 is as accurate as one GPU, and bit-equal to it if the strategy only moves data."""

from __future__ import annotations

import diffusers
import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loading.random import randomise
from seqpar.local import flash, sdpa
from seqpar.loop.loop import Sampler, draw_noise
from seqpar.loop.models import dit
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.types.protocols import Core, Given, Prepare
from tests.loop.test_sampling import scheduler
from tests.support.meshes import LAYOUTS, TRANSPORTS, build, mesh_for, random
from tests.support.pool import Pool

pytestmark = pytest.mark.gpu
WORSE = 1.25  # a sharded bf16 error may be this many times one GPU's bf16 error, both against fp64
BF16 = torch.bfloat16


def attention(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, name: str, case: tuple[int, ...]
) -> Tensor:
    batch, tokens, heads, kv, dim = case
    core: Core = {"sdpa": sdpa, "flash": flash}[name].attend
    mesh, shard = mesh_for(strategy, world, device), Shard(tokens, world)
    attend = build(strategy, mesh, shard, core, transport)
    q, k, v = (random((batch, tokens, n, dim), seed, device, BF16) for seed, n in enumerate((heads, kv, kv)))
    mine = shard.slice(mesh.sequence.rank)
    # copied, because the result may lie in memory of the `peer` transport, which is freed with it
    return attend((Given(q[:, mine], k[:, mine], v[:, mine], Prepare()),))[0].clone()


@pytest.mark.parametrize("case", [(2, 1024, 16, 16, 72), (1, 1025, 6, 6, 128), (3, 257, 8, 2, 64)], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "flash"])
@pytest.mark.parametrize("strategy", ["ulysses", "kv_gather"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gpu_strategy_that_only_moves_data_has_one_gpus_bits(
    ranks: Pool, world: int, transport: str, strategy: str, name: str, case: tuple[int, ...]
) -> None:
    module = {"sdpa": sdpa, "flash": flash}[name]
    if (reason := module.why_not(torch.device("cuda"), BF16, case[4])) is not None:
        pytest.skip(reason)
    one = ranks.run(1, attention, strategy, transport, name, case)[0]
    assert torch.equal(torch.cat(ranks.run(world, attention, strategy, transport, name, case), dim=1), one)


def model(dtype: torch.dtype, device: torch.device | str, layers: int = 4) -> dit.Model:
    built = dit.Model(dit.Config(6, 72, layers, sample_size=32, num_classes=10))
    randomise(built, 0)  # drawn on the CPU in fp32, so that every dtype and rank has the same weights
    return built.to(device, dtype).requires_grad_(False).eval()


def inputs(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random((2, 4, 34, 30), 1, device),
        torch.tensor([960, 3], device=device),
        torch.tensor([2, 10], device=device),
    )


def one_call(rank: int, world: int, device: torch.device, strategy: str, dtype: torch.dtype) -> Tensor:
    local = "reference" if dtype == torch.float64 else "auto"
    sharded = DistributedDiT(model(dtype, device), mesh_for(strategy, world, device), strategy, local)
    x, t, y = inputs(device)
    return sharded(x, timestep=t, class_labels=y).sample.double()


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gpu_sharded_bf16_is_as_good_as_one_gpus(ranks: Pool, world: int, strategy: str) -> None:
    truth = ranks.run(1, one_call, "ulysses", torch.float64)[0]
    allowed = WORSE * (ranks.run(1, one_call, "ulysses", BF16)[0] - truth).norm()
    for got in ranks.run(world, one_call, strategy, BF16):
        assert (got - truth).norm() <= allowed


def run(rank: int, world: int, device: torch.device, strategy: str) -> Tensor:
    sharded = DistributedDiT(model(BF16, device), mesh_for(strategy, world, device), strategy)
    noise = draw_noise((2, 4, 34, 30), torch.Generator().manual_seed(0))
    labels = {"class_labels": torch.tensor([3, 4])}
    return sample(sharded, scheduler(), noise, labels, steps=5, guidance=Guidance(3.0))


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_gpu_every_rank_ends_with_the_same_bits(ranks: Pool, world: int, strategy: str) -> None:
    first, *others = ranks.run(world, run, strategy)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def long_run(
    rank: int, world: int, device: torch.device, strategy: str, cfg: int, graph: bool, transport: str = "collective"
) -> Tensor:
    sharded = DistributedDiT(model(BF16, device), mesh_for(strategy, world, device, cfg), strategy, "auto", transport)
    noise = draw_noise((2, 4, 34, 30), torch.Generator().manual_seed(0))
    labels = {"class_labels": torch.tensor([3, 4])}
    return sample(
        sharded,
        scheduler(),
        noise,
        labels,
        steps=100,
        guidance=Guidance(3.0),
        eta=0.5,
        graph=graph,
        generator=torch.Generator().manual_seed(1),
    )


@pytest.mark.parametrize(("strategy", "cfg"), [*((name, 1) for name in LAYOUTS), ("ulysses", 2), ("kv_gather", 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpu_a_hundred_replays_have_the_eager_bits(
    ranks: Pool, world: int, transport: str, strategy: str, cfg: int
) -> None:
    """Each replay has another timestep, modulation, noise and state; the exchanges are inside the graph."""
    if cfg > world:
        pytest.skip("one rank has no axis for guidance")
    eager = ranks.run(world, long_run, strategy, cfg, False, "collective")
    graphed = ranks.run(world, long_run, strategy, cfg, True, transport)
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))


TRACED = [
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DDPMScheduler",
]
LEARNED = {"DDPMScheduler": {"variance_type": "learned_range"}}


def traced_runs(rank: int, world: int, device: torch.device, name: str, graph: bool) -> list[Tensor]:
    """Return the latents of two runs; the second reuses the buffers and the graph of the first."""
    sharded, labels = DistributedDiT(model(BF16, device), mesh_for("ulysses", world, device), "ulysses"), [3, 4]
    noise = draw_noise((2, 4, 34, 30), torch.Generator().manual_seed(0))
    own = getattr(diffusers, name)(**LEARNED.get(name, {}))
    with Sampler(sharded, graph=graph) as sampler:
        return [
            sampler(
                own,
                noise,
                {"class_labels": torch.tensor(labels)},
                steps=25,
                guidance=Guidance(3.0),
                generator=torch.Generator().manual_seed(1),
            )
            for _ in range(2)
        ]


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("world", [1, 2])
def test_gpu_traced_schedulers_have_the_eager_bits_in_a_graph(ranks: Pool, world: int, name: str) -> None:
    """The step counter on the device selects the history's slots (DDPM: the noise) and the guidance scale."""
    for eager, graphed in zip(
        ranks.run(world, traced_runs, name, False), ranks.run(world, traced_runs, name, True), strict=True
    ):
        assert all(torch.equal(eager[0], other) for other in (eager[1], *graphed))


def very_long_run(
    rank: int, world: int, device: torch.device, strategy: str, layers: int, graph: bool, transport: str
) -> Tensor:
    sharded = DistributedDiT(
        model(BF16, device, layers), mesh_for(strategy, world, device), strategy, "auto", transport
    )
    noise = draw_noise((1, 4, 34, 30), torch.Generator().manual_seed(0))
    labels = {"class_labels": torch.tensor([3])}
    return sample(sharded, scheduler(), noise, labels, steps=500, guidance=Guidance(3.0), eta=0.5, graph=graph)


@pytest.mark.parametrize("layers", [2, 3])  # kv_gather alternates between two slots: try even and odd numbers
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_gpu_five_hundred_replays_through_peers_memory(ranks: Pool, world: int, strategy: str, layers: int) -> None:
    eager = ranks.run(world, very_long_run, strategy, layers, False, "collective")
    graphed = ranks.run(world, very_long_run, strategy, layers, True, "peer")
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))


def test_gpu_a_graph_of_a_table_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many labels the modulation table holds one step at a time, and the warm-up must not read past it."""
    whole = long_run(0, 1, torch.device("cuda", 0), "ulysses", 1, True)
    monkeypatch.setattr("seqpar.loop.run.TABLE_BYTES", 1)
    by_steps = long_run(0, 1, torch.device("cuda", 0), "ulysses", 1, True)
    # the products that make the table then have another number of rows, and round differently
    assert (by_steps - whole).norm() < 1e-2 * whole.norm()


def run_watched(rank: int, world: int, device: torch.device, strategy: str) -> bool:
    """Run steps and raise an error if a step after the first makes the host wait for the GPU."""
    sharded = DistributedDiT(model(BF16, device), mesh_for(strategy, world, device), strategy)
    noise = draw_noise((2, 4, 32, 32), torch.Generator().manual_seed(0))
    labels = {"class_labels": torch.tensor([3, 4])}

    def watch(index: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if index < 4 else "default")

    try:
        latents = sample(
            sharded, scheduler(), noise, labels, steps=5, guidance=Guidance(3.0), graph=False, on_step=watch
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return bool(latents.isfinite().all())


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpu_no_step_waits_on_the_host(ranks: Pool, world: int, strategy: str) -> None:
    assert all(ranks.run(world, run_watched, strategy))


def test_gpu_the_mesh_is_on_gpus(ranks: Pool) -> None:
    assert Mesh.single("cuda").device.type == "cuda"
    assert ranks.device == "cuda"
