"""Tests of the steps bench's lines and messages, and that committed lines produce the committed tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import bench as entry
from launch.benches import numerics, table, timing
from launch.benches.exchange import Exchange
from launch.benches.steps import Steps, check, layouts

ROOT = Path(__file__).parents[3]
# run the benches of this checkout, not an installed package
ENV = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
}


def bench(*flags: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `launch/bench.py steps` on the CPU with a small model; a hang is a failure."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(start if ranks > 1 else [sys.executable]), str(ROOT / "launch/bench.py"), "steps"]
    small = {"--model": "dit-s/8", "--tokens": "16", "--steps": "1", "--rounds": "2"}
    rest = [word for name, value in small.items() if name not in flags for word in (name, value)]
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *rest, *flags], capture_output=True, text=True, timeout=120, check=False, env=env)


def steps_of(page: Path) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in page.read_text().splitlines()]
    return [line for line in lines if line["bench"] == "steps"]


# file names begin with dates, so the newest is the last; lines without a page of their own belong to another page
PAGES = [
    page
    for page in sorted((ROOT / "docs" / "benchmarks").glob("*.jsonl"))
    if steps_of(page) and page.with_suffix(".md").exists()
]


def test_bench_writes_one_line_a_row(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    done = bench("--out", str(out))
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["case"]["tokens"] == 16
    assert line["gpus"] == 1
    assert line["ms"]["min"] <= line["ms"]["median"] <= line["ms"]["max"]
    assert "16 tokens  1 x  ulysses" in done.stdout


def test_bench_runs_this_checkout() -> None:
    """The checkout is used whatever package is installed and whatever the working directory is."""
    # find the module without importing it, which would take seconds and show no more
    code = (
        "from importlib.util import find_spec as at; print(*(at(x).origin for x in ('launch.benches.steps', 'seqpar')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENV, cwd="/")
    assert done.stdout.split() == [str(ROOT / "launch" / "benches" / "steps.py"), str(ROOT / "seqpar" / "__init__.py")]


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 5), (3, 4), (4, 9)])
def test_layouts_use_all_ranks_once(world: int, count: int) -> None:
    found = layouts(Steps(), world)
    assert len(set(found)) == len(found) == count
    assert all(x.cfg * x.ring * x.ulysses == world for x in found)


def test_layouts_are_those_asked_for() -> None:
    found = layouts(Steps(layouts=("ring:1:4", "ulysses:2:1")), 4)
    assert [str(layout) for layout in found] == ["ring cfg1 ring4 ulysses1", "ulysses cfg2 ring1 ulysses2"]


@pytest.mark.parametrize(
    ("args", "world", "message"),
    [
        (Steps(tokens=(16, 20)), 1, "got --tokens 20, expected squares: 16 or 25"),
        (Steps(tokens=(0,)), 1, "got --tokens 0, expected squares: 1"),
        (Steps(tokens=(-4,)), 1, "got --tokens -4, expected squares: 1"),
        (Steps(layouts=("foo",)), 1, "got --layouts foo, expected some of ulysses:1:1"),
        (
            Steps(layouts=("ulysses:1:1", "ring:1:3", "foo")),
            2,
            "got --layouts ring:1:3 foo, expected some of kv_gather:1:1, ulysses:1:1, kv_first:1:1, ring:1:2, ulyss",
        ),
        (Steps(layouts=("kv_gather:2:1",)), 2, "got --layouts kv_gather:2:1"),
        (Steps(steps=0), 1, "got --steps 0 --rounds 3"),
        (Steps(rounds=0), 1, "got --steps 10 --rounds 0"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(args: Steps, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(args, world)


@pytest.mark.parametrize("tokens", [1, 4, 1024, 4096, 65536])
def test_square_token_counts_are_accepted(tokens: int) -> None:
    check(Steps(tokens=(tokens,), layouts=("ulysses:1:1",)), 1)


@pytest.mark.parametrize("name", ["kernels", "tiles", "ladder"])
def test_a_bench_of_kernels_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="got no GPU, expected one"):
        entry.run(0)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (("--layouts", "foo"), 1, "error: got --layouts foo, expected some of ulysses:1:1"),
        (("--model", "dit-xs"), 2, "error: got model 'dit-xs': there is no such path; presets"),
    ],
    ids=["a check", "no such model"],
)
def test_a_mistake_is_one_message(tmp_path: Path, flags: tuple[str, ...], ranks: int, message: str) -> None:
    out = tmp_path / "lines.jsonl"
    done = bench(*flags, "--out", str(out), ranks=ranks)
    assert done.returncode == (1 if ranks > 1 else 2)
    assert done.stderr.startswith(message)
    assert (done.stdout + done.stderr).count(message) == ranks  # the second one is in torchrun's own report
    assert ranks > 1 or "Traceback" not in done.stderr  # torchrun prints a traceback of its own
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Exchange(seconds=float("nan")), "got --seconds nan, expected a number"),
        (Exchange(megabytes=(1.0, float("nan"))), "got --megabytes nan, expected a number"),
        (Steps(out=Path("/")), "got --out /, which is a folder"),
        (Steps(out=Path("/nowhere/lines.jsonl")), "got --out /nowhere/lines.jsonl, which cannot be written"),
    ],
    ids=str,
)
def test_no_bench_starts_with_flags_that_it_cannot_end_with(args: Steps | Exchange, message: str) -> None:
    entry.check(Steps(out=Path("lines.jsonl")))  # a negative control
    with pytest.raises(ValueError, match=message):
        entry.check(args)


def test_numerics_of_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="got --models without a name"):
        numerics.main(numerics.Numerics(models=()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_committed_tables_are_made_of_committed_lines(page: Path) -> None:
    text = page.with_suffix(".md").read_text()
    for made in table.tables([json.loads(line) for line in page.read_text().splitlines()]):
        assert made in text


def beside_peers(lines: Sequence[dict[str, Any]], name: str, model: str, tokens: int) -> str:
    """A row of README's table: the best peer, our fastest with the tokens split like theirs and by the planner."""

    def least(kind: str, layout: str = "") -> tuple[float, str]:
        """ms and layout of the fastest line of a kind, on two GPUs and for one picture, of those with this layout."""
        found = []
        for line in lines:
            if not line["bench"].startswith("scale") or line["gpus"] != 2 or not line["ms"]:
                continue
            case = line["case"]
            its = case["way"].removeprefix("ceiling of ").split(",")[0]
            if (case["model"], case["tokens"], case["kind"]) == (model, tokens, kind) and layout in its:
                found += [(line["ms"]["median"], its)] if " data" not in its else []  # that makes two pictures
        return min(found)

    peer, same, (planned, layout) = least("peer")[0], least("ours", "ulysses2")[0], least("ours")
    ceiling = least("ceiling", layout)[0]
    digits = 1 if peer >= 100 else 2
    cells = [f"{name}, {tokens} tokens", f"{peer:.{digits}f}"]
    for ms in (same, planned):
        cells += [f"{ms:.{digits}f}", f"{peer / ms:.2f} x"]
    return "| " + " | ".join([*cells, f"{planned / ceiling:.2f}"]) + " |"


def test_the_table_of_the_readme_is_made_of_committed_lines() -> None:
    (shown,) = [
        block for block in (ROOT / "README.md").read_text().split("\n\n") if block.startswith("| work | best peer ")
    ]
    page = ROOT / "docs" / "benchmarks" / "2026-11-21-2xh200.jsonl"
    lines = [json.loads(text) for text in page.read_text().splitlines()]
    works = [("Large-DiT-7B", 256), ("Large-DiT-7B", 4096), ("DiT-XL/2", 1024), ("DiT-XL/2", 4096)]

    def made(of: Sequence[dict[str, Any]]) -> list[str]:
        return [beside_peers(of, name, name.lower(), tokens) for name, tokens in works]

    assert shown.splitlines()[2:] == made(lines)
    faster = [
        {**line, "ms": {"median": line["ms"]["median"] / 2}}
        for line in lines
        if line["bench"].startswith("scale") and line["ms"]
    ]
    assert not set(made(faster)) & set(shown.splitlines())  # a negative control


def test_tables_of_tiles_and_products_name_the_fastest() -> None:
    at = {"kernel": "SwiGLU", "width": 8, "rows": 2}
    lines = [
        {"bench": "tiles", "case": at | {"tile": tile}, "ms": {"median": ms}, "share_of_copy": 0.5 / ms}
        for tile, ms in (("wide", 2.0), ("today", 1.0), ("narrow", 0.5))
    ]
    at = {"product": "w1, w3", "rows": 2}
    ways = {"alone": (1.0, None), "and a kernel": (2.0, 2e-3), "slow": (1.7, 3e-3), "fused": (1.5, 1e-3)}
    lines += [
        {"bench": "products", "case": at | {"way": way}, "ms": {"median": ms}, "tflops": 3.0, "error": error}
        for way, (ms, error) in ways.items()
    ]
    products, tiles = table.tables(lines)
    assert products.endswith("| w1, w3 | 2 | 1000.0 | 2000.0 | 1500.0 | 1.0e-03 | fused | 2 |")
    assert tiles.endswith("| SwiGLU | 8 | 2 | 1000.0 us, 50 % | 500.0 us, 100 % | narrow |")


def test_a_command_is_told_without_where_its_lines_went(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (["steps", "--out", "x.jsonl", "--tokens", "16"], ["steps", "--tokens", "16", "--out=x.jsonl"]):
        monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
        assert timing.command() == "launch/bench.py steps --tokens 16"
