"""Tests that the planner's predictions match measurements, and that it picks the layout measured as the fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.families import flux
from seqpar.loading.names import RANDOM_MODELS
from seqpar.planner import costs
from seqpar.planner.predict import EIGHT_SPEED, predict
from seqpar.planner.rates import H200
from seqpar.planner.search import TIE, Preferences
from seqpar.types.facts import Blocks, Cross, Layout, Work
from tests.planner.test_plan import ALONE, CFG_KF2, CFG_KV2, CFG_U2, ONE, SEVEN_B, U4, XL, of, planned

# ms a step of Large-DiT-7B by the `peer` transport (kv_first when its projection was two products):
# docs/benchmarks/2026-11-21-4xh200.md, one GPU: 2026-11-21-h200.md and 2026-11-20-h200-tuned.md
PEERS = {
    256: {ALONE: 11.51, U4: 5.40, CFG_U2: 5.32, CFG_KV2: 5.13, CFG_KF2: 5.52},
    4096: {ALONE: 193.6, U4: 52.6, CFG_U2: 51.8, CFG_KV2: 50.9, CFG_KF2: 49.7},
}
# ms a step of DiT-XL/2 on NCCL: docs/benchmarks/2026-11-20-h200-engine.md
XL_ALONE, XL_CFG = of(1, 1, transport="nccl"), of(2, 1, transport="nccl")
XL_U2, XL_KV2, XL_R2 = of(1, 2, "ulysses", "nccl"), of(1, 2, "kv_gather", "nccl"), of(1, 1, "ring", "nccl", 2)
NCCL = {
    1024: {XL_ALONE: 4.70, XL_CFG: 2.78},
    4096: {XL_ALONE: 26.54, XL_U2: 17.72, XL_KV2: 16.82, XL_R2: 16.69, XL_CFG: 13.42},
    16384: {XL_ALONE: 251.75, XL_U2: 141.58, XL_KV2: 141.00, XL_R2: 140.61, XL_CFG: 129.31},
}
# ms a step by the `peer` transport on two ranks of one sequence: docs/benchmarks/2026-11-21-2xh200.md
PAIRS = [
    (SEVEN_B, 256, True, {"kv_gather": 6.89, "ulysses": 7.07, "kv_first": 7.33}),
    (SEVEN_B, 1024, True, {"kv_gather": 24.63, "ulysses": 24.75, "kv_first": 24.13}),
    (SEVEN_B, 1024, False, {"kv_gather": 13.01, "ulysses": 13.09, "kv_first": 12.59}),
    (SEVEN_B, 4096, True, {"kv_gather": 101.39, "ulysses": 101.58, "kv_first": 100.45}),
    (XL, 1024, True, {"kv_gather": 3.56, "ulysses": 3.81, "kv_first": 4.04}),
    (XL, 1024, False, {"kv_gather": 2.84, "ulysses": 3.09, "kv_first": 3.44}),
    (XL, 4096, True, {"kv_gather": 14.59, "ulysses": 14.84, "kv_first": 14.28}),
]


@pytest.mark.parametrize(
    ("work", "rows", "within"), [(SEVEN_B, PEERS, 0.11), (XL, NCCL, 0.05)], ids=["large-dit-7b", "dit-xl/2"]
)
def test_predictions_are_what_was_measured(work: Work, rows: dict[int, dict[Layout, float]], within: float) -> None:
    for tokens, measured in rows.items():
        for layout, ms in measured.items():
            assert predict(work, replace(ONE, tokens=tokens), layout, H200).ms == pytest.approx(ms, rel=within), layout


@pytest.mark.parametrize("transport", ["peer", "of a user"])
def test_one_rank_needs_no_measured_transport(transport: str) -> None:
    layout = replace(ALONE, transport=transport)
    assert predict(SEVEN_B, ONE, layout, replace(H200, exchange={})).ms == predict(SEVEN_B, ONE, ALONE, H200).ms


def test_gemms_of_the_state_in_8_bits_take_less_time_and_their_weights_more_memory() -> None:
    """Those of text, and all on a CPU keep their time."""
    (kind,), width = SEVEN_B.blocks, SEVEN_B.width
    crossed = replace(kind, cross=Cross(77, ((width, 2 * width),)))
    saved = list[float]()
    for blocks in (kind, replace(kind, apart=(kind.gemms,)), crossed):
        work = replace(SEVEN_B, blocks=(blocks,), once=())
        wide, eight = (predict(work, replace(ONE, others=(64,), eight=on), ALONE, H200) for on in (False, True))
        saved.append(wide.gemm - eight.gemm)
        assert eight.attention == wide.attention
        size = kind.count * sum(inputs * outputs for inputs, outputs in kind.gemms)
        assert eight.memory.weights - wide.memory.weights == size
        stored = predict(work, replace(ONE, others=(64,), eight=True, stored=1000), ALONE, H200)
        assert wide.memory.weights - stored.memory.weights == 1000 * (ONE.itemsize - 1)
        assert stored.gemm == eight.gemm
        cpu = replace(H200, device="CPU")
        assert predict(work, replace(ONE, others=(64,), eight=True), ALONE, cpu).gemm == wide.gemm
        if blocks is kind:
            assert wide.gemm / eight.gemm == pytest.approx(EIGHT_SPEED)
    assert saved[2] == pytest.approx(saved[0])
    assert saved[1] == pytest.approx(saved[0], rel=0.03)  # without the rows of text


def test_the_page_shows_these_predictions() -> None:
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    for layout in PEERS[256]:
        pairs = [
            (PEERS[tokens][layout], predict(SEVEN_B, replace(ONE, tokens=tokens), layout, H200)) for tokens in PEERS
        ]
        name = f"{layout} by {layout.strategy}" if layout.sequence > 1 else "one GPU"
        assert f"| {name} | " + " | ".join(f"{ms} / {row.ms:.4g}" for ms, row in pairs) + " |" in text


@pytest.mark.parametrize("tokens", PEERS)
def test_the_pick_is_within_three_percent_of_the_best_measured(tokens: int) -> None:
    measured = PEERS[tokens]
    found = planned(replace(ONE, tokens=tokens))
    assert measured[found.best] <= 1.03 * min(measured.values())
    assert found.best == {256: CFG_KV2, 4096: CFG_KF2}[tokens]


@pytest.mark.parametrize(("work", "tokens", "guidance", "measured"), PAIRS)
def test_the_strategy_of_two_ranks_is_the_fastest_measured_or_ties_with_it(
    work: Work, tokens: int, guidance: bool, measured: dict[str, float]
) -> None:
    load = replace(ONE, tokens=tokens, guidance=guidance, labels=1 + guidance)
    found = planned(load, world=2, wish=Preferences(axes={"cfg": 1}), work=work)
    assert measured[found.best.strategy] <= (1 + TIE) * min(measured.values())


# ms a step of FLUX.1-dev, 4096 + 512 tokens, by the `peer` transport: docs/benchmarks/2026-11-22-h200-flux.md
@pytest.mark.parametrize(
    ("world", "measured"), [(2, {"kv_first": 65.4, "ulysses": 67.5, "kv_gather": 68.3}), (4, {"kv_first": 36.1})]
)
def test_flux_hides_keys_and_values_behind_the_mlp_of_its_single_blocks(world: int, measured: dict[str, float]) -> None:
    """Without work beside attention, and with q, k and v made by the block itself, nothing is hidden."""
    work = flux.work(RANDOM_MODELS["FLUX.1-dev"].parts["transformer"][1])
    load = replace(ONE, guidance=False, labels=1, others=work.joined)
    found = planned(load, world=world, work=work)
    assert found.best.strategy == "kv_first"
    for strategy, ms in measured.items():
        assert predict(work, load, of(1, world, strategy), H200).ms == pytest.approx(ms, rel=0.09), strategy
    given = replace(work, blocks=tuple(replace(kind, beside=(), given=True) for kind in work.blocks))
    exchanged = {name: predict(given, load, of(1, world, name), H200).exchange for name in ("kv_gather", "kv_first")}
    assert exchanged["kv_first"] >= exchanged["kv_gather"]
    assert planned(load, world=world, work=given).best.strategy != "kv_first"


@pytest.mark.parametrize(
    ("copy_us", "exposed_us"),
    [
        (1.0, 1.0),  # the products hide the copies, but not the wait itself
        (100.0, 1.0),  # a copy takes as long as a product: v is sent when q's begins, and arrives when it ends
        (130.0, 60.0),
    ],  # k is 30 us late; v is late by k's delay and its own
)
def test_exposed_of_kv_first_is_what_neither_product_hides(copy_us: float, exposed_us: float) -> None:
    """The products of v and q take 100 us each; an exchange of no bytes takes 1 us."""
    half = 2048 * 4096 * 2
    rates = replace(
        H200,
        gemm=((1.0, 2e-6 * 2048 * 4096 * 4096 / 100.0), (1e12, 2e-6 * 2048 * 4096 * 4096 / 100.0)),
        exchange={"peer": ((half / 2, 1.0), (half, copy_us), (4 * half, 4 * copy_us))},
    )
    first = predict(SEVEN_B, ONE, CFG_KF2, rates)
    swap_us = 1.0  # once a step
    assert first.exchange == pytest.approx((32 * exposed_us + swap_us) / 1e3)


STREAMS = Blocks(1, ((8, 24), (8, 8)), (16,), apart=(((8, 24), (8, 8)),))
SINGLE = Blocks(1, ((8, 24), (8, 32), (40, 8)), (16,), beside=((8, 32), (32, 8)))


def work_of(*blocks: Blocks) -> Work:
    return Work(8, 4, 4, 2, blocks, True, (), 1, 0)


def test_streams_with_weights_of_their_own_have_products_and_passes_of_their_own() -> None:
    """A kernel takes at least 1 us and no longer here, so times count kernels; rank 0 has 3 of 5 text tokens."""
    rates = replace(H200, gemm=((1.0, 1e9), (2.0, 1e9)), weights=1e9, copy=1e9, kernel_us=1.0)
    load, layout = replace(ONE, tokens=8, others=(5,)), of(1, 2, "kv_gather")
    apart, shared = (predict(work_of(kind), load, layout, rates) for kind in (STREAMS, replace(STREAMS, apart=())))
    assert apart.gemm - shared.gemm == pytest.approx(2e-3)
    assert apart.elementwise - shared.elementwise == pytest.approx(1e-3)
    first = predict(work_of(STREAMS), load, of(1, 2, "kv_first"), rates)
    assert first.gemm == pytest.approx(2 * 4e-3)  # q, k and v are separate products of both streams
    assert STREAMS.products(8, (5,)) == ((8, 8, 24), (8, 8, 8), (5, 8, 24), (5, 8, 8))
    assert work_of(SINGLE, STREAMS).step(1, 8, (5,)).flops == 2 * 13 * 8 * (24 + 32 + 40 + 24 + 8) + 2 * 4 * 13**2 * 8
    both = costs.layers(work_of(STREAMS), layout, 8, others=(5,))
    assert [layer.calls[0].queries for layer in both] == [4 + 3, 4 + 2]
    assert {layer.calls[0].keys for layer in both} == {13}


@pytest.mark.parametrize(("copy_us", "exposed_us"), [(1.0, 1.0), (300.0, 200.0)])
def test_keys_and_values_travel_behind_the_mlp_of_a_single_block(copy_us: float, exposed_us: float) -> None:
    """Two copies start at once; the MLP's two products take 200 us each and hide all that they cover."""
    gemms = ((4096, 12288), (4096, 16384), (20480, 4096))
    kind = replace(SINGLE, gemms=gemms, beside=((4096, 4096), (4096, 4096)))
    work = Work(4096, 32, 32, 128, (kind,), True, (), 1, 0)
    rate = 2e-6 * 2048 * 4096 * 4096 / 200.0
    half = 2048 * 4096 * 2
    load = replace(ONE, guidance=False, labels=1)
    exchange = {"peer": ((half / 2, 1.0), (half, copy_us), (4 * half, 4 * copy_us))}
    rates = replace(H200, gemm=((1.0, rate), (1e12, rate)), exchange=exchange)
    assert predict(work, load, of(1, 2, "kv_first"), rates).exchange == pytest.approx(exposed_us / 1e3)
    assert predict(work, load, of(1, 2, "kv_gather"), rates).exchange == pytest.approx(2 * copy_us / 1e3, rel=0.5)


def test_of_kv_first_nothing_is_hidden_where_kernels_move_it() -> None:
    plain, first = (predict(SEVEN_B, ONE, of(2, 2, name, "nccl"), H200) for name in ("kv_gather", "kv_first"))
    assert first.exchange == plain.exchange
