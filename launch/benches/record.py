"""Digests of the latents and ms a step of fixed runs of the launcher: what must not change when code is moved.

Each run is a new process (or torchrun) of `launch/sample.py`, so that any two versions of the project can be compared:
`--trees` names further checkouts, whose runs take turns with those of this one (A B A B), which keeps drifting clocks
out of the ratio. Bits of a CPU depend on its instruction set: compare digests of one machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from PIL import Image

from launch.benches.timing import append, command

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # of one run


@dataclass(frozen=True)
class Case:
    """One run of the launcher: the number of processes and its flags."""

    name: str
    ranks: int
    flags: str


BUILTIN = "--model builtin --classes cat dog 7 --guidance 3.5 --seed 3"
XL = "--model dit-xl/2 --classes 207 --size 512 --seed 1"
SEVEN_B = "--model large-dit-7b --classes 207 --size 1024 --seed 1"
CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case("builtin, one rank", 1, f"{BUILTIN} --steps 6 --dtype fp32"),
        Case("builtin, ulysses 2", 2, f"{BUILTIN} --steps 6 --dtype fp32 --mesh ulysses=2 --strategy ulysses"),
        Case("builtin, ring 3", 3, f"{BUILTIN} --steps 6 --dtype fp32 --mesh ring=3 --strategy ring"),
        Case(
            "builtin, kv_gather 2, peer, eta",
            2,
            f"{BUILTIN} --steps 6 --dtype fp32 --strategy kv_gather --transport peer --eta 1",
        ),
        Case("builtin, cfg 2, kv_first 2", 4, f"{BUILTIN} --steps 6 --dtype fp32 --mesh cfg=2 --strategy kv_first"),
        Case(
            "dit-xl/2, ulysses 2",
            2,
            "--model dit-xl/2 --classes 207 --size 64 --steps 2 --dtype bf16 --strategy ulysses",
        ),
        # 15 GB of weights; four tokens
        Case("7b, one rank", 1, "--model large-dit-7b --classes 207 --size 32 --steps 2 --dtype bf16"),
    ),
    "gpus": (
        Case("builtin, one rank", 1, f"{BUILTIN} --steps 25"),
        Case("builtin, ulysses 2", 2, f"{BUILTIN} --steps 25 --mesh ulysses=2 --strategy ulysses"),
        Case("builtin, ring 2", 2, f"{BUILTIN} --steps 25 --mesh ring=2 --strategy ring"),
        Case("dit-xl/2 1024, one rank", 1, f"{XL} --steps 200"),
        Case("dit-xl/2 1024, kv_gather 2", 2, f"{XL} --steps 200 --strategy kv_gather"),
        Case("dit-xl/2 1024, cfg 2", 2, f"{XL} --steps 200 --mesh cfg=2"),
        Case("7b 4096, one rank", 1, f"{SEVEN_B} --steps 25"),
        Case("7b 4096, kv_first 2", 2, f"{SEVEN_B} --steps 25 --strategy kv_first"),
        Case("7b 4096, cfg 2", 2, f"{SEVEN_B} --steps 25 --mesh cfg=2"),
    ),
}


@dataclass(frozen=True)
class Record:
    """Record digests and ms a step of fixed runs, of this checkout and of others in turn."""

    where: Literal["cpu", "gpus"] = "gpus" if torch.cuda.is_available() else "cpu"
    """Which runs: those for CPUs or those for GPUs."""
    only: tuple[str, ...] = ()
    """Only the runs whose name contains one of these words."""
    trees: tuple[Path, ...] = ()
    """Other checkouts to compare with; the first named one runs first."""
    rounds: int = 1
    """How often each run is repeated; ms are medians over the rounds."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Record) -> None:
    """Run every case of every tree in turn, print the table, and fail where digests of two trees differ."""
    cases = [case for case in CASES[args.where] if not args.only or any(word in case.name for word in args.only)]
    if not cases or args.rounds < 1:
        raise ValueError(f"got --only {args.only} --rounds {args.rounds}, expected words of a run's name and a round")
    lines = []
    for line in measure(cases, [*args.trees, ROOT], args.rounds):
        lines.append(line)
        append([line], args.out)  # at once: a run that is cut off keeps what it has
    print(table(lines, [*map(named, args.trees), named(ROOT)]), flush=True)
    if unequal := sorted({line["case"] for line in lines if len(digests(lines, line["case"])) > 1}):
        raise ValueError(f"got different latents for {', '.join(unequal)}, expected equal digests")


def measure(cases: Sequence[Case], trees: Sequence[Path], rounds: int) -> Iterator[dict[str, Any]]:
    """One line for each run: case, tree, digest, ms a step."""
    for case in cases:
        for _ in range(rounds):
            for tree in trees:
                line = {"bench": "record", "case": case.name, "ranks": case.ranks, "flags": case.flags}
                yield line | {"tree": named(tree), **run(case, tree), "command": command()}


def run(case: Case, tree: Path) -> dict[str, Any]:
    """The digest and the ms a step that the launcher of a checkout wrote into its picture."""
    start = [sys.executable]
    if case.ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
    paths = filter(None, (str(tree.absolute()), os.environ.get("PYTHONPATH")))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "picture.png"
        words = [*start, str(tree.absolute() / "launch/sample.py"), *case.flags.split(), "--out", str(out)]
        done = subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"got exit {done.returncode} from {' '.join(words)}, expected 0:\n{done.stderr[-2000:]}")
        told = json.loads(Image.open(out).info["seqpar"])  # pyright: ignore[reportArgumentType]
    plan = re.search(r"^plan +(.*)$", done.stdout, re.MULTILINE)
    return {"digest": told["latents"], "ms": told["ms_per_step"], "plan": plan and plan.group(1)}


def named(tree: Path) -> str:
    """Return the name of a checkout in lines and tables: its folder, or "this" for the one that this file is in."""
    return "this" if tree == ROOT else tree.name


def digests(lines: Sequence[dict[str, Any]], case: str) -> set[str]:
    """All digests that a case has in any tree."""
    return {line["digest"] for line in lines if line["case"] == case}


def table(lines: Sequence[dict[str, Any]], trees: Sequence[str]) -> str:
    """A row a case: digest (or that they differ), ms of each tree, and the last tree's ms over the first's."""
    rows = []
    for case in dict.fromkeys(line["case"] for line in lines):
        found = digests(lines, case)
        times = [median(line["ms"] for line in lines if line["case"] == case and line["tree"] == t) for t in trees]
        shown = " ".join(f"{ms:9.3f}" for ms in times)
        rows.append(
            f"{case:34} {found.pop() if len(found) == 1 else 'DIFFERENT':16} {shown} {times[-1] / times[0]:.4f}"
        )
    return "\n".join([f"{'run':34} {'latents':16} ms a step of {' | '.join(trees)}, last over first", *rows])
