"""Each bench of a table runs once on two ranks of a CPU, with tiny models; its rows compute what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launch import bench
from launch.baselines.released import RELEASED
from launch.benches import rows, steps
from launch.benches.exchange import MOVES
from seqpar.families._find import WORK
from seqpar.mesh.mesh import Mesh
from seqpar.profiling.ranks import NAMES
from tests.support.pool import Pool

pytestmark = pytest.mark.bench
QUICK = ("--rounds", "1", "--seconds", "0.001")
CPU = torch.device("cpu")
Line = dict[str, Any]


@pytest.fixture(scope="module")
def cpus() -> Iterator[Pool]:
    pool = Pool("cpu")
    yield pool
    pool.close()


def run(rank: int, world: int, device: torch.device, words: tuple[str, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench.py", *words])
        patch.setattr(steps, "DIGEST_STEPS", 2)
        bench.run(rank)


@pytest.fixture
def benched(cpus: Pool, tmp_path: Path) -> Callable[..., list[Line]]:
    def lines_of(*words: str) -> list[Line]:
        out = tmp_path / "lines.jsonl"
        cpus.run(2, run, (*words, "--out", str(out)))
        lines = [json.loads(text) for text in out.read_text().splitlines()]
        assert all(line["command"].startswith(f"launch/bench.py {words[0]}") for line in lines)
        assert all(line["ms"]["min"] <= line["ms"]["median"] <= line["ms"]["max"] for line in lines if line.get("ms"))
        return lines

    return lines_of


def test_a_step_of_our_loop_is_timed(benched: Callable[..., list[Line]]) -> None:
    words = ("--model", "builtin", "--tokens", "16", *QUICK, "--layouts", "ulysses:1:1")
    lines = benched("steps", *words, "ulysses:2:1", "--precision", "fp8")
    layouts = ["ulysses cfg1 ring1 ulysses2", "ulysses cfg2 ring1 ulysses1"]
    cases = [(layout, precision) for layout in layouts for precision in (None, "fp8")]
    assert [(line["case"]["layout"], line["case"].get("precision")) for line in lines] == cases
    assert all(1e-4 < line["error"] < 0.1 for line in lines[1::2])
    assert all(line["over"] > 0 and line["reference"].startswith("ceiling of") for line in lines)
    (*_, line) = benched("steps", *words, "--split")
    assert set(line["split_ms"]) == {*NAMES}
    assert line["split_ms"]["products"] > 0
    assert line["split_ms"]["attention"] > 0


# they make several rows of modulation, attend to the text or the image alone in blocks before their own, pad the text,
# or compute sound: `Work` counts none of it
BY_TOKEN = {
    "chroma1-hd",
    "chroma1-hd-prompt",
    "flux.3",
    "krea-2",
    "ltx-2",
    "minimax-h3",
    "qwen-image-edit",
    "wan2.2-ti2v-5b",
    "z-image",
}
# some models have one small model
SMALL = {name: replace(model.small(), name="") for name, model in RELEASED.items()}
DIFFERENT = [name for name, model in SMALL.items() if next(each for each in SMALL if SMALL[each] == model) == name]


@pytest.mark.parametrize("model", DIFFERENT)
def test_calls_compute_what_diffusers_computes(benched: Callable[..., list[Line]], model: str) -> None:
    lines = benched("calls", "--model", model, "--strategy", "ulysses", *QUICK)
    ours = [line for line in lines if line["case"]["kind"] == "ours"]
    assert len(ours) == 3
    assert all(line["error"] < 1e-4 and line["over"] > 0 for line in ours)
    assert all("expected GPUs" in line["refused"] for line in lines if line not in ours)


def test_the_parts_of_a_call_are_timed(benched: Callable[..., list[Line]]) -> None:
    (line,) = benched("calls", "--strategy", "ulysses", "--only", "blocks, ulysses", "--split", *QUICK)
    assert line["split_ms"]["products"] > 0


@pytest.mark.parametrize("model", sorted({*DIFFERENT} - BY_TOKEN))
def test_a_call_has_the_flops_that_torch_counts(model: str) -> None:
    """The modulation and the text's embedding are in a call; `Work` counts them apart from a step."""
    known = RELEASED[model].small()
    work = WORK[known.theirs](known.config, known.text)
    theirs, given = known.build(torch.float32, CPU), known.arguments(torch.float32, CPU)
    # the counter knows matrix products, but not the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(**given, return_dict=False)
    rest = sum(2 * inputs * outputs for inputs, outputs in work.modulation())
    rest += sum(2 * known.text * inputs * outputs for inputs, outputs in work.text)
    assert counter.get_total_flops() == work.step(1, known.tokens, known.others).flops + rest


def test_strips_are_the_picture_of_one_rank(benched: Callable[..., list[Line]]) -> None:
    lines = benched("decode", "--vae", "kl", "wan", "--size", "32", "--frames", "5", *QUICK)
    ways = {(line["case"]["vae"], line["case"]["way"]): line for line in lines}
    for vae in ("kl", "wan"):
        assert ways[vae, "ours, 2 ranks"]["difference"] < 1e-5
        assert ways[vae, "diffusers, eager, again"]["over"] > 0


def test_exchanges_are_timed_beside_bare_collectives(benched: Callable[..., list[Line]]) -> None:
    lines = benched(
        "exchange", "--megabytes", "0.001", "--heads", "4", "--head-dim", "2", "--rounds", "2", "--seconds", "0.001"
    )
    ways = {(line["case"]["move"], line["case"]["transport"]) for line in lines if line["ms"]}
    assert ways == {(move, way) for move in MOVES for way in ("collective", "peer")}
    assert all(line["over"] > 0 and line["reference"] == "bare" for line in lines)


def refused(rank: int, world: int, device: torch.device) -> list[Line]:
    """Measure a row that cannot be set up on one rank, one that is late, and one that no word asks for."""

    def fail() -> Tensor:
        raise RuntimeError("no room\nhere") if rank else ValueError("got no room")

    mesh, named = Mesh.joined(), [rows.Row("ours", name, fail) for name in ("one", "two")]  # pyright: ignore
    flags = rows.Flags(only=("two",), rounds=1)
    return [
        *rows.measure("none", {}, named, mesh, flags),
        *rows.measure("none", {}, named, mesh, replace(flags, minutes=-1.0)),
    ]


def test_a_row_that_is_not_possible_has_the_reason_on_all_ranks(cpus: Pool) -> None:
    for lines in cpus.run(2, refused):
        assert [(line["case"]["way"], line["refused"]) for line in lines] == [
            ("two", "got no room"),
            ("two", rows.LATE),
        ]
        assert all(line["refused"] in rows.shown(line) for line in lines)
