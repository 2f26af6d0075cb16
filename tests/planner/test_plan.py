"""Tests that the planner picks the layout with the best prediction, explains it, and refuses impossible requests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.attention import ulysses
from seqpar.local import sdpa
from seqpar.loop.models import dit, large_dit
from seqpar.mesh.mesh import Mesh
from seqpar.planner import rates
from seqpar.planner.costs import strategies
from seqpar.planner.plan import make, parse_mesh
from seqpar.planner.predict import GIB, Load, predict
from seqpar.planner.rates import CPU, H200, Rates
from seqpar.planner.search import Preferences, Ranking, allowed, search
from seqpar.types.facts import Layout, Work
from tests.support.pool import Pool

SEVEN_B, XL = large_dit.work(large_dit.SIZES["large-dit-7b"]), dit.work(dit.SIZES["dit-xl/2"])
PARAMETERS = 7_293_819_936
ONE = Load(
    images=1,
    tokens=4096,
    guidance=True,
    steps=25,
    itemsize=2,
    parameters=PARAMETERS,
    latent=16,
    labels=2,
    table=2 << 30,
)


def planned(
    load: Load = ONE,
    world: int = 4,
    wish: Preferences | None = None,
    rates: Rates = H200,
    work: Work = SEVEN_B,
    transport: str = "peer",
    memory: float | None = 139,
) -> Ranking:
    return search(work, load, world, wish or Preferences(), rates, transport, memory)


def of(cfg: int, ulysses: int, strategy: str = "ulysses", transport: str = "peer", ring: int = 1) -> Layout:
    return Layout(1, cfg, ring, ulysses, strategy, transport)


ALONE, U4, CFG_U2, CFG_KV2, KV4 = of(1, 1), of(1, 4), of(2, 2), of(2, 2, "kv_gather"), of(1, 4, "kv_gather")
CFG_KF2, KF4 = of(2, 2, "kv_first"), of(1, 4, "kv_first")


def test_without_guidance_all_ranks_are_on_the_sequence() -> None:
    assert planned(replace(ONE, guidance=False, labels=1)).best == KF4
    assert planned(replace(ONE, guidance=False, labels=1, tokens=256)).best == KV4
    assert planned(world=1).best == ALONE
    assert planned(world=2).best == of(2, 1)
    assert planned(world=3).best.sizes == {"data": 1, "cfg": 1, "ring": 1, "ulysses": 3}


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ({"exchange": {"peer": ((1e3, 1000.0), (1e9, 1100.0))}}, KV4),  # exchanges are slow: few are better
        ({"exchange": {"peer": ((1e3, 1.0), (1e9, 1e6))}}, U4),  # bytes are slow: few are better
    ],
    ids=["slow to start", "slow links"],
)
def test_other_rates_another_choice(change: dict[str, Any], best: Layout) -> None:
    """On four ranks of one sequence kv_gather moves twice as many bytes as ulysses, in half as many exchanges."""
    found = planned(replace(ONE, guidance=False, labels=1), rates=replace(H200, **change))
    assert found.best == best


def test_ties_go_to_the_first_in_order_and_rings_only_where_nothing_else_fits() -> None:
    free = replace(H200, exchange={"peer": ((1.0, 1e-6), (1e12, 2e-6))}, copy=1e9, kernel_us=1e-9)
    assert planned(rates=free).best == CFG_KV2
    crowded = replace(ONE, tokens=1 << 20, guidance=False, labels=1)
    everything = planned(crowded, transport="nccl", memory=None)
    needs = {row.layout: row.memory.total / GIB for row in everything.ranked}
    ring4 = of(1, 1, "ring", "nccl", ring=4)
    assert min(needs, key=lambda layout: needs[layout]) == ring4  # it keeps two blocks, the others keep all
    others = min(need for layout, need in needs.items() if layout.strategy in ("ulysses", "kv_gather"))
    roomy = planned(crowded, transport="nccl", memory=1.01 * others / 0.95)
    assert roomy.best.strategy in ("ulysses", "kv_gather")
    tight = planned(crowded, transport="nccl", memory=0.99 * others / 0.95)
    assert tight.best.strategy in ("ring", "usp")


@pytest.mark.parametrize(
    "layout", [ALONE, U4, CFG_U2, CFG_KV2, CFG_KF2, of(1, 2, "usp", ring=2), of(2, 1, "ring", ring=2)], ids=str
)
def test_more_tokens_take_longer_and_more_memory(layout: Layout) -> None:
    counts = (4, 16, 17, 64, 255, 256, 257, 1000, 1024, 4096, 4097, 16384, 65536, 262144)
    rows = [predict(SEVEN_B, replace(ONE, tokens=tokens), layout, H200) for tokens in counts]
    times, memory = [row.ms for row in rows], [row.memory.total for row in rows]
    assert times == sorted(times)
    assert memory == sorted(memory)
    assert times[-1] > 100 * times[0]


def test_the_slowest_rank_counts() -> None:
    """With 6 heads on 4 ranks, two ranks have 2 heads; with 4097 tokens, one rank has 1025."""
    few, steady = replace(SEVEN_B, heads=6, kv_heads=6), replace(H200, attention={128: ((1.0, 600.0),)})
    whole = predict(few, ONE, ALONE, steady).attention
    assert predict(few, ONE, U4, steady).attention == pytest.approx(whole / 3)
    assert predict(few, ONE, KV4, steady).attention == pytest.approx(whole / 4)
    even, odd = (predict(SEVEN_B, replace(ONE, tokens=tokens), U4, H200) for tokens in (4096, 4097))
    longer = predict(SEVEN_B, replace(ONE, tokens=4100), U4, H200)
    assert even.gemm < odd.gemm == longer.gemm
    assert odd.ms < 1.01 * even.ms


def test_memory_by_hand() -> None:
    """The 7B in bf16 on one rank keeps weights, 25 steps x 2 labels x (6 x 32 + 2) x 4096 fp32, and two more rows."""
    memory = predict(SEVEN_B, ONE, ALONE, H200).memory
    row = (6 * 32 + 2) * 4096 * 4
    assert memory.weights == 2 * PARAMETERS
    assert memory.table == (25 * 2 + 2) * row
    assert memory.activations == 8192 * ((4 * 4096 + 3 * 11008) * 2 + 3 * 16 * 4)
    assert memory.exchange == 0
    chunked = predict(SEVEN_B, replace(ONE, steps=1000, labels=100), ALONE, H200).memory
    assert chunked.table == (6 * 100 + 2) * row  # six steps fit in 2 GiB
    shared = predict(SEVEN_B, ONE, of(1, 4, "kv_gather", "nccl"), H200).memory
    assert shared.exchange == 2 * 2 * 4096 * (1024 + 2 * 4096)  # q of this rank's tokens, keys and values of all tokens


def test_a_layout_that_does_not_fit_is_listed_with_the_reason() -> None:
    long = replace(ONE, tokens=1 << 19)
    sizes = sorted(row.memory.total / GIB for row in planned(long, memory=None).ranked)
    limit = sum(sizes[1:3]) / 2 / 0.95
    found = planned(long, memory=limit)
    assert len(found.ranked) == sum(size <= 0.95 * limit for size in sizes) > 0
    assert len(found.too_big) == len(sizes) - len(found.ranked) > 0
    assert f"does not fit: needs {sizes[-1]:.1f} GiB of {0.95 * limit:.1f} on each rank" in found.table()
    nothing = planned(memory=10)
    assert str(nothing).startswith("nothing fits")
    assert nothing.table().count("does not fit: needs") == len(sizes)
    with pytest.raises(ValueError, match=r"does not fit: its smallest layout \(.*\) needs .* of 9.5 on each rank;"):
        print(nothing.best)


@pytest.mark.parametrize(
    ("world", "load", "wish", "message"),
    [
        (2, ONE, Preferences(axes={"ulysses": 3}), "data=1 x cfg=1 x ring=1 x ulysses=3, 3 ranks, for 2 process"),
        (4, ONE, Preferences(axes={"ring": 0}), "got ring=0, expected a whole number of at least 1"),
        (6, ONE, Preferences(axes={"cfg": 3}), "got cfg=3, expected 1 or 2"),
        (
            4,
            replace(ONE, tokens=1),
            Preferences(),
            r"1 tokens cannot be sharded over 2 ranks \(at least one per rank\); use a larger --size",
        ),
        (
            2,
            ONE,
            Preferences(axes={"ulysses": 2}, strategy="ring"),
            "got strategy ring with ulysses=2, expected ulysses=1",
        ),
        (2, ONE, Preferences(axes={"data": 2}), "got strategy auto with data=2 \\(ranks: 2, images: 1,"),
    ],
    ids=str,
)
def test_the_impossible_is_refused(world: int, load: Load, wish: Preferences, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(load, world, wish)


@pytest.mark.parametrize(
    ("world", "strategy", "mesh", "cfg_ring_ulysses"),
    [
        (4, "auto", "auto", (2, 1, 2)),
        (3, "auto", "auto", (1, 1, 3)),
        (1, "ring", "auto", (1, 1, 1)),
        (2, "ring", "auto", (1, 2, 1)),
        (4, "ulysses", "auto", (1, 1, 4)),
        (4, "kv_gather", "auto", (1, 1, 4)),
        (4, "usp", "auto", (1, 2, 2)),
        (3, "usp", "auto", (1, 1, 3)),
        (2, "ring", "cfg=1", (1, 2, 1)),
        (4, "ring", "cfg=2", (2, 2, 1)),
        (8, "usp", "cfg=2", (2, 2, 2)),
        (4, "ring", "ring=2", (2, 2, 1)),  # the sequence axes are given, so the other ranks are for guidance
        (4, "ulysses", "ulysses=2", (2, 1, 2)),
        (4, "usp", "ulysses=2", (1, 2, 2)),
        (4, "kv_gather", "ring=2", (1, 2, 2)),
        (4, "auto", "cfg=1,ring=2", (1, 2, 2)),
        (4, "auto", "ulysses=4", (1, 1, 4)),
        (4, "auto", "data=2", (2, 1, 1)),
    ],
)
@pytest.mark.parametrize("found", [H200, CPU], ids=["H200", "CPU"])
def test_names_restrict_what_is_looked_at(
    found: Rates, world: int, strategy: str, mesh: str, cfg_ring_ulysses: tuple[int, int, int]
) -> None:
    load, wish = replace(ONE, images=2), Preferences(*parse_mesh(mesh), strategy)
    best = planned(load, world, wish, found, transport=next(iter(found.exchange))).best
    assert (best.cfg, best.ring, best.ulysses) == cfg_ring_ulysses
    assert strategy in ("auto", best.strategy)


def test_who_names_the_ulysses_axis_means_ulysses_while_there_are_heads() -> None:
    one_exchange = replace(H200, exchange={"peer": ((1e3, 1000.0), (1e9, 1100.0))})
    assert planned(wish=Preferences(axes={"cfg": 2, "ulysses": 2}), rates=one_exchange).best == CFG_U2
    grouped = replace(SEVEN_B, kv_heads=2)
    assert planned(wish=Preferences(axes={"ulysses": 4}), rates=one_exchange, work=grouped).best == KV4


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("aim", ["latency", "throughput"])
def test_every_layout_uses_all_ranks_and_stands_once(world: int, aim: Any) -> None:
    found = allowed(world, Preferences(aim), SEVEN_B, replace(ONE, images=4), "nccl")
    assert len(set(found)) == len(found)
    assert all(x.data * x.cfg * x.sequence == world and x.data <= 4 for x in found)
    assert any(x.data > 1 for x in found) == (aim == "throughput" and world > 1)
    ranked = planned(replace(ONE, images=4), world, Preferences(aim)).ranked
    assert [row.ms for row in ranked[1:]] == sorted(row.ms for row in ranked[1:])


def test_what_a_strategys_file_says_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With free links and passes strategies tie: the first in order wins if it only moves data, and has no rule."""
    free = replace(H200, exchange={"peer": ((1.0, 1e-6), (1e12, 2e-6))}, copy=1e9, kernel_us=1e-9)
    load, known = replace(ONE, guidance=False, labels=1), ulysses.FACTS
    assert planned(load, rates=free).best.strategy == "kv_gather"
    for change, best in (({}, "ulysses"), ({"moves_only": False}, "kv_gather")):
        monkeypatch.setattr(ulysses, "FACTS", replace(known, order=0, **change))
        assert planned(load, rates=free).best.strategy == best
    monkeypatch.setattr(ulysses, "FACTS", replace(known, why_not=lambda *sizes: f"{sizes[-1]} heads, expected others"))
    assert "ulysses" not in {row.layout.strategy for row in planned(load).ranked}
    with pytest.raises(ValueError, match="got strategy ulysses with 32 heads, expected others"):
        planned(load, wish=Preferences(axes={"ulysses": 4}, strategy="ulysses"))


def test_throughput_gives_pictures_to_ranks_where_there_are_enough() -> None:
    many = planned(replace(ONE, images=4), wish=Preferences("throughput"))
    assert many.best == Layout(4, 1, 1, 1, "ulysses", "peer")
    assert many.ranked[0].exchange == 0
    assert planned(replace(ONE, images=4)).best == CFG_KF2  # latency of the first picture: all ranks work on it
    assert planned(wish=Preferences("throughput")).best == CFG_KF2  # one picture cannot use a data axis
    three = planned(replace(ONE, images=3), wish=Preferences("throughput"))
    assert three.best.data < 3  # three pictures on two ranks of data would leave one rank waiting for the other


def test_the_line_says_what_is_next_and_on_what_grounds() -> None:
    text = str(planned(wish=Preferences(axes={"cfg": 2})))
    assert text == (
        "cfg 2 x ulysses 2 by kv_first, 49.6 ms per step predicted (lowest latency); next cfg 2 x ulysses 2 "
        "by kv_gather, 52.7 ms per step; rates: defaults of an H200"
    )
    first = planned().ranked[0]
    ring = replace(first, layout=of(1, 1, "ring", ring=4), gemm=0.0)
    note = "(not chosen automatically: it rounds differently from one rank)"
    assert note in str(replace(planned(), ranked=(first, ring)))
    tie = planned(replace(ONE, images=3), wish=Preferences("throughput", strategy="usp"), transport="nccl")
    assert tie.ranked[1].ms < tie.ranked[0].ms  # asked for, and not taken for another reason
    assert "unasked" not in str(tie)
    assert "nothing else to choose" in str(planned(world=1))
    long = planned(replace(ONE, tokens=100_000), world=1)
    assert f"one rank, {long.ranked[0].ms:.0f} ms per step" in str(long)
    assert long.ranked[0].ms > 1e3
    assert "e+" not in str(long) + long.counts()
    assert "highest throughput" in str(planned(wish=Preferences("throughput")))
    with pytest.raises(ValueError, match=f"got strategy 'mine', expected one of {', '.join(sorted(strategies()))}"):
        planned(wish=Preferences(strategy="mine"))


def test_a_model_with_key_masks_gets_a_local_attention_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "why_not", lambda device, dtype, head_dim, mask=False: "no masks" if mask else None)
    work, small = dit.work(dit.SIZES["dit-s/8"]), replace(ONE, parameters=1000, tokens=64)
    for masked, local in ((False, "sdpa"), (True, "reference")):
        made = make(replace(work, masked=masked), small, torch.float32, Mesh.single(), Preferences())
        assert made.local.name == local


def on_rank(rank: int, world: int, device: torch.device, folder: str) -> tuple[str, str]:
    before = os.environ.get("SEQPAR_CACHE")
    os.environ["SEQPAR_CACHE"] = f"{folder}/{rank}"
    try:
        ranks = Mesh.joined(torch.device("cpu"))
        assert ranks.sizes == {"data": 1, "cfg": 1, "ring": 1, "ulysses": 1}
        small = replace(ONE, parameters=1000, tokens=64)
        made = make(dit.work(dit.SIZES["dit-s/8"]), small, torch.float32, ranks, Preferences())
    finally:
        os.environ.pop("SEQPAR_CACHE")
        if before is not None:
            os.environ["SEQPAR_CACHE"] = before
    return str(made), str(made.layout)


def test_the_rates_of_rank_zero_decide_for_all(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "1"))
    rates.save(replace(CPU, source="only on rank 1", exchange={"gloo": ((1e4, 1e6), (1e6, 2e6))}), 2)
    first, second = ranks.run(2, on_rank, str(tmp_path))
    assert first == second
    assert "only on rank 1" not in first[0]
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "0"))
    rates.save(replace(CPU, source="on rank 0"), 2)
    assert all("on rank 0" in text for text, _ in ranks.run(2, on_rank, str(tmp_path)))


def test_what_crosses_hosts_has_the_time_of_their_network() -> None:
    """Branches of guidance part between hosts; a group counts as crossing where its ranks do not fill hosts evenly."""
    work, load = SEVEN_B, ONE
    here, pairs, fours = (replace(H200, host=host) for host in (None, 2, 4))
    usp = of(1, 2, "usp", "nccl", ring=2)

    def exchange(layout: Layout, rates: Rates) -> float:
        return predict(work, load, layout, rates).exchange

    network = replace(H200, exchange={**H200.exchange, "nccl": H200.exchange[rates.BETWEEN]})
    inside = replace(usp, cfg=1)
    assert exchange(of(1, 4, transport="nccl"), fours) == exchange(of(1, 4, transport="nccl"), here)
    assert exchange(of(1, 4, transport="nccl"), pairs) == exchange(of(1, 4, transport="nccl"), network)
    assert exchange(inside, here) < exchange(inside, pairs) < exchange(inside, network)  # heads stay on a host
    assert exchange(of(2, 2, transport="nccl"), pairs) < 1.2 * exchange(of(2, 2, transport="nccl"), here)
    assert exchange(of(1, 2, transport="nccl"), replace(H200, host=3)) == exchange(of(1, 2, transport="nccl"), network)
    assert planned(world=8, rates=fours, transport="nccl").best.cfg == 2
