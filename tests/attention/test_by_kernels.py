"""Tests of the path of a GPU on CPUs.

Every kernel that a GPU would launch runs in Triton's interpreter, on several ranks, from the model through strategies
and transports to the guided update. The results must be those of plain torch.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loop.loop import draw_noise
from seqpar.loop.models import dit, large_dit
from seqpar.planner.costs import facts_of, layers
from seqpar.types.facts import Layout
from seqpar.types.masks import key_bias
from tests.attention.test_bits import PAIRS, Row, formula, outputs
from tests.attention.test_strategies import TWO_STREAMS, built, copied, equal, error, joined, streams_of, truth
from tests.conftest import DEVICE
from tests.loop.test_sampling import scheduler
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, mesh_for, random, ring_of
from tests.support.pairs import covering
from tests.support.pool import Pool

# numpy warns in the interpreter, where it computes activations
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs all other tests launch kernels"),
]
KERNELS = {  # file -> function that launches -> name in the counts
    **{name: {"launch": name} for name in ("adaln", "ddim", "flags", "merge", "push")},
    "prepare": {"launch": "prepare", "launch_into": "prepare_into"},
    "activations": {"launch_gelu": "gelu", "launch_swiglu": "swiglu"},
}
TOLERANCE = 2e-5  # fp32, outputs of a few units
MODELS: dict[str, Any] = {
    "large_dit": lambda: large_dit.Model(large_dit.Config(48, 1, 6, 3, 40, num_classes=10)),
    "dit": lambda: dit.Model(dit.Config(3, 16, 1, num_classes=10)),
}
SIZES = {2: (2, 10), 3: (2, 14)}  # size of a latent by world: 5 tokens for 2 ranks, 7 for 3, so that both are uneven


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """Launch kernels as on a GPU, except in fp64, and count the launches of each file."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for name, launches in KERNELS.items():
            module = importlib.import_module(f"seqpar.kernels.{name}")
            patch.setattr(module, "fused", lambda x: x.dtype != torch.float64)
            for launch, counted in launches.items():
                patch.setattr(module, launch, counting(counted, getattr(module, launch)))
        yield counts


def model_of(name: str) -> Any:
    """Return a model of one layer in fp32 with random weights."""
    model = MODELS[name]().requires_grad_(False)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(random(tuple(parameter.shape), seed, dtype=torch.float32) * 0.2)
    return model


def forward(
    rank: int,
    world: int,
    device: torch.device,
    name: str,
    strategy: str,
    transport: str,
    size: tuple[int, int],
    kernels: bool,
    batch: int = 2,
) -> tuple[Tensor, Counter[str]]:
    """Return one output of the model for a latent of this size and this many batch rows, and the launches."""
    engine = DistributedDiT(model_of(name), mesh_for(strategy, world, device), strategy, "auto", transport)
    x, t = random((batch, 4, *size), 1, dtype=torch.float32), torch.tensor([960, 3])[:batch]
    labels = {"class_labels": torch.tensor([2, 7])[:batch]}
    if not kernels:
        return engine(x, timestep=t, **labels).sample, Counter()
    with launched() as counts:
        out = engine(x, timestep=t, **labels).sample
        engine.release()
        return out, counts


# heads of large_dit's groups are shared evenly by three ranks, and unevenly by two, which only ulysses sees
UNEVEN_HEADS = ("ulysses", "peer", 2, "large_dit")
MODEL_OF_WORLD = (pytest.param(2, "dit"), pytest.param(3, "large_dit"))


@pytest.mark.parametrize(
    ("strategy", "transport", "world", "name"), [*covering(LAYOUTS, TRANSPORTS, turns=MODEL_OF_WORLD), UNEVEN_HEADS]
)
def test_a_sharded_model_by_its_kernels(ranks: Pool, world: int, name: str, strategy: str, transport: str) -> None:
    truth = ranks.run(1, forward, name, "ulysses", "collective", SIZES[world], False)[0][0]
    for got, counts in ranks.run(world, forward, name, strategy, transport, SIZES[world], True):
        assert (got - truth).abs().max() < TOLERANCE
        assert counts["adaln"] == 3  # before the block, and two in it
        assert counts["swiglu"] + counts["gelu"] == 1
        ring, axes = ring_of(strategy, world), facts_of(strategy).axes
        heads = "ulysses" in axes and ring == 1  # heads are exchanged, without a ring
        # the layer pushes its output; with collectives it also pushes the heads of each rank into their places
        pushes = 1 + world * (transport == "collective")
        assert counts["push"] == (pushes if heads else 0)
        mesh, work = Layout(1, 1, ring, world // ring, strategy, "gloo"), large_dit.work(large_dit.Config())
        assert bool(counts["merge"]) == bool(layers(work, mesh, 9)[0].merges)
        # in an exchange of heads the kernels that write raise the flags; other strategies launch flags separately
        assert bool(counts["flags"]) == (transport == "peer" and not heads)
        assert strategy != "kv_gather" or counts["flags"] == (1 if transport == "peer" else 0)
        # q, k and v, together or separately; a DiT's queries need no norm or rotary, and do not move
        passes = {"ulysses": 1, "kv_gather": 1, "kv_first": 2 if name == "dit" else 3}
        expected = passes.get(strategy, 1 if heads else 0)
        assert counts["prepare_into"] == expected or (strategy not in passes and not axes)


@pytest.mark.parametrize(
    ("name", "transport", "passes"),
    [("large_dit", "peer", 2), ("large_dit", "collective", 3), ("dit", "peer", 1), ("dit", "collective", 2)],
)
def test_kv_first_by_peer_takes_one_batch_rows_values_from_their_product(
    ranks: Pool, name: str, transport: str, passes: int
) -> None:
    truth = ranks.run(1, forward, name, "ulysses", "collective", SIZES[2], False, 1)[0][0]
    for got, counts in ranks.run(2, forward, name, "kv_first", transport, SIZES[2], True, 1):
        assert (got - truth).abs().max() < TOLERANCE
        assert counts["prepare_into"] == passes
        assert counts["flags"] == (3 if transport == "peer" else 0)  # all have begun, v is there, wait


FEW = replace(TWO_STREAMS[1], tokens=(2, 4))  # the interpreter runs every token of every batch row by itself
CALLS = {name: 1 + (name == "peer") for name in TRANSPORTS}  # a second call by peer memory uses the other slots


def two_streams(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> tuple[list[Tensor], int]:
    """Return the outputs of a masked block of two streams, and its passes that write outboxes."""
    attend, mask = built(FEW, world, device, strategy, transport)
    assert mask is not None
    streams, bias = streams_of(FEW, rank, world, device, dtype=torch.float32), key_bias(mask, torch.float32)
    with launched() as counts:
        outs = [copied(attend(streams, bias)) for _ in range(CALLS[transport])]
    assert equal(outs[0], outs[-1])
    return outs[0], counts["prepare_into"]


# on one rank all strategies are the same; a model of one stream runs by all strategies and both transports above
@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [
        (1, "ulysses", "collective"),
        *((3, strategy, "peer") for strategy in LAYOUTS),
        *((3, strategy, "collective") for strategy in ("ulysses", "kv_first")),
    ],
)
def test_two_streams_by_their_kernels(ranks: Pool, world: int, strategy: str, transport: str) -> None:
    """Three ranks have two text tokens, so one rank writes no text; a rank without heads still writes its tokens."""
    results = ranks.run(world, two_streams, strategy, transport)
    assert error(joined([outs for outs, _ in results]), truth(FEW)) < TOLERANCE
    for rank, (_, count) in enumerate(results):
        parts = 2 if rank < 2 else int(strategy != "ring")  # a ring does not copy a single stream
        # kv_first writes k, v and q of a stream in three passes, but the product makes v of one token in its place
        first = strategy == "kv_first" and world > 1
        passes = parts * (3 if first else 1) - int(first and transport == "peer" and rank > 0)
        assert count == CALLS[transport] * passes


ORDERED, PADDED = Row(PAIRS[1]), Row(replace(PAIRS[0], masked=False), padding=1)


def in_order(
    rank: int, world: int, device: torch.device, row: Row, strategy: str, transport: str
) -> tuple[list[Tensor], Counter[str]]:
    with launched() as counts:
        return outputs(row, world, device, strategy, transport, torch.float32), counts


IN_ORDER = (
    pytest.param(2, TRANSPORTS[0], PADDED),
    pytest.param(3, TRANSPORTS[0], ORDERED),
    pytest.param(2, TRANSPORTS[1], PADDED),
)


@pytest.mark.parametrize(("strategy", "world", "transport", "row"), covering(EXACT, turns=IN_ORDER), ids=str)
def test_kernels_hold_keys_in_the_order_of_the_streams_and_weigh_padding(
    ranks: Pool, world: int, strategy: str, transport: str, row: Row
) -> None:
    results = ranks.run(world, in_order, row, strategy, transport)
    got = joined([outs for outs, _ in results])
    if row.padding:
        assert error(got, formula(row)) < 1e-5
        assert min(counts["merge"] for _, counts in results) >= 2  # in two calls
    else:
        assert equal(got, in_order(0, 1, torch.device("cpu"), row, "kv_gather", "collective")[0])
    assert min(counts["push"] for _, counts in results) >= 4  # k and v of two calls


def sampled(rank: int, world: int, device: torch.device, cfg: int, transport: str, kernels: bool) -> Tensor:
    mesh = mesh_for("ulysses", world, device, cfg)
    engine = DistributedDiT(model_of("large_dit"), mesh, "ulysses", "auto", transport)
    noise, labels = draw_noise((1, 4, 2, 10), torch.Generator().manual_seed(0)), {"class_labels": torch.tensor([3])}
    work = {"steps": 2, "guidance": Guidance(3.0)}
    if not kernels:
        return sample(engine, scheduler(), noise, labels, **work)
    with launched() as counts:
        latents = sample(engine, scheduler(), noise, labels, **work)
        assert counts["ddim"] == 2
    engine.release()
    return latents


@pytest.mark.parametrize(("world", "cfg", "transport"), [(2, 2, "collective"), (4, 2, "peer")])
def test_a_run_by_its_kernels(ranks: Pool, world: int, cfg: int, transport: str) -> None:
    truth = ranks.run(1, sampled, 1, "collective", False)[0]
    for got in ranks.run(world, sampled, cfg, transport, True):
        assert (got - truth).abs().max() < 1e-3  # guidance multiplies the model's rounding
