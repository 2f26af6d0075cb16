"""ms of what users wait for in two versions of the project, whose processes take turns (A B A B).

    python launch/bench.py compare --trees ../other --gpus 2 --out x.jsonl

The ranks of every checkout stay alive for a work and time their calls one checkout after the other, so that drifting
clocks and the time to load are not in the ratio. `launch/benches/compare_job.py` is what the ranks run; it says which
names of `seqpar` both versions must have. Equal digests are equal bits. Works are written with colons:

    call:MODEL[:cfg | :generic]   a call of a model of `launch/baselines/released.py` through `parallelize`
    step:MODEL:TOKENS[:KEY=VALUE] a step of a model of classes by our own loop, one picture with guidance; keys are
                                  strategy, transport, ring, cfg and eta (step:builtin:64:strategy=ring:ring=2)
    unidiffuser                   a step of UniDiffuser by our own loop
    decode:PIXELS                 a square picture decoded in strips
    picture:PIXELS[:STEPS]        a picture of FLUX.1 from the prompt to the PNG
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch

from launch.benches.compare_job import WORKS
from launch.benches.timing import record, spread

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("compare_job.py")
LIMIT_S = 240.0  # for the ranks to be ready, and for a round


@dataclass(frozen=True)
class Compare:
    """Compare what users wait for between this checkout and others, in alternating rounds."""

    trees: tuple[Path, ...] = ()
    """Other checkouts; the first named one runs first."""
    works: tuple[str, ...] = (
        "call:flux.1-dev",
        "step:large-dit-7b:256",
        "step:large-dit-7b:4096",
        "unidiffuser",
        "decode:2048",
        "picture:1024",
    )
    """What is timed."""
    gpus: int = 2
    """Number of ranks."""
    small: bool = not torch.cuda.is_available()
    """Use models with few blocks and heads, which run on a CPU; --no-small compares the bits of real ones there."""
    rounds: int = 5
    """How often each checkout is timed."""
    calls: int = 20
    """Calls (steps, pictures) of a round; of decodings and pictures at most 5."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Compare) -> None:
    if unknown := [work for work in args.works if work.partition(":")[0] not in WORKS]:
        raise ValueError(f"got --works {unknown[0]}, expected works that begin with {', '.join(WORKS)}")
    if args.rounds < 1 or args.gpus < 1 or args.calls < 1:
        raise ValueError(f"got --rounds {args.rounds} --gpus {args.gpus} --calls {args.calls}, expected at least 1")
    if missing := [tree for tree in args.trees if not (tree / "seqpar" / "__init__.py").is_file()]:
        raise ValueError(f"got --trees {missing[0]}, expected a checkout of this project")
    trees, rows = [*args.trees, ROOT], []
    for work in args.works:
        answers = measured(work, trees, args)
        times = {named(tree): [answer["ms"] for answer in answers[tree]] for tree in trees}
        bits = {answer["digest"] for tree in trees for answer in answers[tree]}
        line = {"bench": "compare", "work": work, "ranks": args.gpus, "ms": times, "digests": sorted(bits)}
        record(line, args.out)
        rows.append(_row(work, times, len(bits) == 1))
        print(rows[-1], flush=True)
    print("\n".join([f"median (least - most) ms of {' | '.join(map(named, trees))}, last over first", *rows]))


def measured(work: str, trees: Sequence[Path], args: Compare) -> dict[Path, list[dict[str, Any]]]:
    answers: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
    with ExitStack() as stack:
        jobs = {tree: stack.enter_context(_job(work, tree, args)) for tree in trees}
        for tree in trees:
            next(jobs[tree])  # ready: its calls are captured
        for _ in range(args.rounds):
            for tree in trees:
                answers[tree].append(next(jobs[tree]))
    return answers


@contextmanager
def _job(work: str, tree: Path, args: Compare) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the ranks of a checkout; yield what asks for a round and returns its answer."""
    calls = min(args.calls, 5) if work.startswith(("decode", "picture")) else args.calls
    with TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        words = [str(JOB), str(tree.absolute()), folder, work, str(calls), "small" if args.small else "whole"]
        process = _started(["--standalone", f"--nproc_per_node={args.gpus}", *words], log)
        try:
            yield _rounds(Path(folder), process)
        finally:
            process.terminate()
            process.wait()


def _started(words: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words], stdout=log, stderr=log)


def _rounds(folder: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        (folder / f"ask-{number}").touch()
        answer, until = folder / f"answer-{number}", time.monotonic() + LIMIT_S
        while not answer.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise ValueError(f"got no answer of the ranks:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.05)
        yield json.loads(answer.read_text())
        number += 1


def named(tree: Path) -> str:
    """The name of a checkout in lines and tables: its folder, or "this" for the one that this file is in."""
    return "this" if tree == ROOT else tree.name


def _row(work: str, times: dict[str, list[float]], same: bool) -> str:
    spreads = [spread(ms) for ms in times.values()]
    shown = "  ".join(f"{ms['median']:9.3f} ({ms['min']:.3f} - {ms['max']:.3f})" for ms in spreads)
    ratio = spreads[-1]["median"] / spreads[0]["median"]
    return f"{work:24} {shown}  {ratio:.4f}  {'same bits' if same else 'OTHER BITS'}"
