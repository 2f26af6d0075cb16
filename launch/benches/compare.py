"""ms of a call of parallelized transformers in two versions of the project, whose processes take turns (A B A B).

    python launch/bench.py compare --trees ../other --gpus 2 --out x.jsonl

The ranks of every checkout stay alive for a model and time their calls one checkout after the other, so that drifting
clocks and the time to load are not in the ratio. `launch/benches/compare_job.py` is what the ranks run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from launch.benches.record import ROOT, named
from launch.benches.timing import append, command, environment, spread

JOB = Path(__file__).with_name("compare_job.py")
LIMIT_S = 240.0  # for the ranks to be ready, and for a round


@dataclass(frozen=True)
class Compare:
    """Compare calls of `seqpar.parallelize` between this checkout and others, in alternating rounds."""

    trees: tuple[Path, ...] = ()
    """Other checkouts; the first named one runs first."""
    models: tuple[str, ...] = ("flux.1-dev", "qwen-image", "qwen-image:cfg", "flux.1-dev:generic")
    """Models of `scale`, or "small"; ":cfg" times both branches of guidance, ":generic" diffusers' own modules."""
    gpus: int = 2
    """Number of ranks."""
    rounds: int = 5
    """How often each checkout is timed."""
    calls: int = 20
    """Calls of a round."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Compare) -> None:
    """Print a table of every model's ms a call in each checkout; fail where results have other bits."""
    trees, rows = [*args.trees, ROOT], []
    for model in args.models:
        answers = measured(model, trees, args)
        times = {named(tree): [answer["ms"] for answer in answers[tree]] for tree in trees}
        bits = {answer["digest"] for tree in trees for answer in answers[tree]}
        line = {"bench": "compare", "model": model, "ranks": args.gpus, "ms": times, "digests": sorted(bits)}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        append([line | {"command": command(), "env": environment(device)}], args.out)
        rows.append(_row(model, times, len(bits) == 1))
        print(rows[-1], flush=True)
    print("\n".join([f"median (least - most) ms a call of {' | '.join(map(named, trees))}, last over first", *rows]))


def measured(model: str, trees: Sequence[Path], args: Compare) -> dict[Path, list[dict[str, Any]]]:
    """Return the answers of every checkout's ranks, one for each round."""
    answers: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
    with ExitStack() as stack:
        jobs = {tree: stack.enter_context(_job(model, tree, args)) for tree in trees}
        for tree in trees:
            next(jobs[tree])  # ready: its calls are captured
        for _ in range(args.rounds):
            for tree in trees:
                answers[tree].append(next(jobs[tree]))
    return answers


@contextmanager
def _job(model: str, tree: Path, args: Compare) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the ranks of a checkout; yield what asks for a round and returns its answer."""
    paths = [str(tree.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}"]
    with TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        words = [*start, str(JOB), folder, model, str(args.calls)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _rounds(Path(folder), process)
        finally:
            process.terminate()
            process.wait()


def _rounds(folder: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Ask the ranks for one round after the other; the first one is what they say when they are ready."""
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


def _row(model: str, times: dict[str, list[float]], same: bool) -> str:
    spreads = [spread(ms) for ms in times.values()]
    shown = "  ".join(f"{ms['median']:9.3f} ({ms['min']:.3f} - {ms['max']:.3f})" for ms in spreads)
    ratio = spreads[-1]["median"] / spreads[0]["median"]
    return f"{model:22} {shown}  {ratio:.4f}  {'same bits' if same else 'OTHER BITS'}"
