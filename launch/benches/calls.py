"""ms of one call of a transformer that people run (`launch/benches/released.py`): ours, other engines, the ceiling.

    for n in 1 2 4; do
        torchrun --nproc_per_node=$n launch/bench.py scale --model flux.1-dev --strategy kv_first ulysses --out x.jsonl
    done

Every row is timed in turn with its reference, the ceiling of its strategy: the matrix products and the attention of one
rank alone, in one CUDA graph, without the products that make the modulation. A row is set up, timed, printed and
appended to the file before the next one is set up; rows that are left when `--minutes` are over are not measured.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import seqpar.local
from launch.benches.ceiling import Share, ceiling, roofline, share
from launch.benches.released import Released
from launch.benches.split import split, traced
from launch.benches.timing import MOST_CALLS, append, attempt, command, elapsed, environment, graphed, slowest, timed
from seqpar.mesh import Mesh
from seqpar.planner.plan import choose_local, load_local
from seqpar.protocols import SequenceModel, plugins

GIB = 1 << 30
# what engines, compilers and torch raise for a case that they cannot run
REFUSALS = (ValueError, RuntimeError, AssertionError, TypeError, AttributeError, ImportError, KeyError, IndexError)
LATE = "left out: --minutes are over"
TRACED_STEPS = 3
TRACED_KERNELS = 25
Line = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """Flags of models that are timed by the call (flux.1-dev, qwen-image, wan2.1-14b)."""

    strategy: tuple[str, ...] = ("kv_first", "ulysses")
    """Strategies of our rows."""
    transport: str = "auto"
    """Transport of our rows."""
    only: tuple[str, ...] = ()
    """Time only rows whose name contains one of these words (ceiling, native, generic, diffusers, graph ...), those of
    the first word first."""
    text: int | None = None
    """Number of text tokens, if not the model's usual one."""
    minutes: float = 9.0
    """Rows that are not set up after this time are left out."""
    trace: tuple[str, ...] = ()
    """Also list the kernels of rows whose name contains one of these words."""


@dataclass(frozen=True)
class Limits:
    """How long to measure: rounds, seconds of a way in a round, and the moment (of `time.monotonic`) to stop at."""

    rounds: int
    seconds: float
    until: float
    trace: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model, its inputs' sizes and the ranks that run it. local: the local attention of our rows, or "auto"."""

    model: Released
    mesh: Mesh
    dtype: torch.dtype
    local: str = "auto"

    @cached_property
    def ours(self) -> SequenceModel:
        """Return our own model with random weights, if there is one."""
        assert self.model.native is not None
        return self.model.native(self.dtype, self.mesh.device)

    @cached_property
    def theirs(self) -> nn.Module:
        """Return diffusers' model with random weights."""
        return self.model.build(self.dtype, self.mesh.device)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call of diffusers' model, the same on every rank."""
        return self.model.arguments(self.dtype, self.mesh.device)

    @cached_property
    def truth(self) -> Tensor:
        """Return the result of diffusers' model on one rank, as it comes."""
        with torch.no_grad():
            return self.theirs(**self.arguments, return_dict=False)[0]

    def share(self, strategy: str) -> Share:
        """Return this rank's share of a call."""
        return share(self.model.work, self.model.tokens, strategy, self.mesh, 1, self.model.others)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a call on each rank, without the modulation."""
        return self.model.work.step(1, self.model.tokens, self.model.others).flops / self.mesh.world.size


@dataclass(frozen=True)
class Timed:
    """A row that is set up. step: one call. after: is called when all is timed. facts: what its line adds."""

    step: Callable[[], object]
    after: Callable[[], object] = lambda: None
    facts: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Row:
    """A way of computing a call. kind: "ceiling", "ours" or "peer". case: the facts that its JSON line repeats.

    strategy: that of the ceiling that the row is compared with. branches: 2 if the row computes both branches of
    guidance; it is compared with two ceilings, then.
    """

    kind: str
    name: str
    strategy: str
    ready: Callable[[], AbstractContextManager[Timed]]
    case: Mapping[str, Any] = field(default_factory=dict)
    branches: int = 1


def asked(rows: Iterable[Row], words: Sequence[str]) -> list[Row]:
    """Return the rows whose name contains one of the words, in the order of the words, each row once; all without."""
    found = {row.name: row for row in rows}
    names = [name for word in words or ("",) for name in found if word in name]
    return [found[name] for name in dict.fromkeys(names)]


def measure(case: Case, rows: Sequence[Row], limits: Limits, out: Path | None) -> list[Line]:
    """Time the rows one after the other, append a line for each, and print a table last."""
    lines: list[Line] = []
    with References(case) as references:
        for row in rows:
            line = _measured(case, row, limits, references)
            lines.append(line)
            free(case.mesh.device)
            if case.mesh.is_main:
                append([line], out)
                print(shown(line), flush=True)
    if case.mesh.is_main and lines:
        print("\n" + table(case, lines), flush=True)
    return lines


class References(ExitStack):
    """The ceilings without modulation, which rows are compared with: each is set up once and kept."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self._made: dict[Share, Callable[[], object]] = {}

    def of(self, strategy: str) -> Callable[[], object]:
        """Return a call of the ceiling of a strategy; strategies with the same shapes share it."""
        mine = self._case.share(strategy)
        if mine not in self._made:
            self._made[mine] = self.enter_context(_ceiling(self._case, strategy, False)).step
        return self._made[mine]


def _measured(case: Case, row: Row, limits: Limits, references: References) -> Line:
    """Set a row up, time it in turn with its reference, and return its line."""
    mesh = case.mesh
    if mesh.share(time.monotonic() > limits.until, bool):
        return _line(case, row) | {"refused": LATE}
    begun = time.monotonic()
    with ExitStack() as stack:
        reference, why = attempt(lambda: references.of(row.strategy), mesh, *REFUSALS)
        before = _allocated(mesh.device)
        ready, why = (None, why) if why else attempt(lambda: stack.enter_context(row.ready()), mesh, *REFUSALS)
        if ready is None or reference is None:
            return _line(case, row) | {"refused": why}
        setup = time.monotonic() - begun
        found, why = attempt(partial(_times, ready.step, reference, limits, mesh), mesh, *REFUSALS)
        if found is None:
            return _line(case, row) | {"refused": why}
        ready.after()
        facts = {"gib": (_allocated(mesh.device) - before) / GIB, **ready.facts(), "setup_s": setup}
        if any(word in row.name for word in limits.trace) and mesh.device.type == "cuda":
            facts |= _trace(ready.step, mesh)
    spreads = slowest(found, mesh)
    return _line(case, row, spreads["row"], spreads["ceiling"]) | facts


def _times(
    step: Callable[[], object], reference: Callable[[], object], limits: Limits, mesh: Mesh
) -> dict[str, list[float]]:
    """Return this rank's ms of the row and of its reference, in rounds (A B A B)."""
    works = {"ceiling": reference, "row": step}
    calls = {name: _calls(limits.seconds, work, mesh) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(limits.rounds):
        for name, work in works.items():
            mesh.collect(None, None)
            times[name].append(elapsed(work, calls[name], mesh.device))
    return times


def _calls(seconds: float, work: Callable[[], object], mesh: Mesh) -> int:
    """Return the number of calls that take about `seconds`, the same on all ranks, at least 1."""
    ms = max(mesh.collect(elapsed(work, 1, mesh.device), float))
    return int(min(MOST_CALLS, max(1, 1e3 * seconds / ms)))


# Ceilings ---------------------------------------------------------------------------------------------------------


def ceilings(case: Case, strategies: Sequence[str]) -> Iterator[Row]:
    """Yield the ceilings of the strategies, each with and without the products that make the modulation."""
    done: set[Share] = set()
    for strategy in strategies:
        if (mine := case.share(strategy)) in done:
            continue
        done.add(mine)
        for modulation in (False, True) if case.model.work.modulation() else (False,):
            name = f"ceiling {'with' if modulation else 'without'} modulation, {strategy}"
            ready = partial(_ceiling, case, strategy, modulation)
            yield Row("ceiling", name, strategy, ready, {"strategy": strategy, "modulation": modulation})


@contextmanager
def _ceiling(case: Case, strategy: str, modulation: bool) -> Iterator[Timed]:
    mine, device = case.share(strategy), case.mesh.device
    local = fastest(case, mine)
    step = ceiling(case.model.work, mine, local, case.dtype, device, modulation)
    yield Timed(graphed(step) if device.type == "cuda" else step, facts=lambda: {"local": local})


def fastest(case: Case, mine: Share) -> str:
    """Return the local attention that is fastest at a rank's shapes, or the one that was asked for."""
    device, dim = case.mesh.device, case.model.work.head_dim
    if case.local != "auto" or device.type != "cuda" or not mine.calls:
        return choose_local(case.local, device, case.dtype, dim).name
    times: dict[str, list[float]] = {}
    (call, *_) = mine.calls
    q, k, v = (
        torch.randn(1, tokens, heads, dim, device=device, dtype=case.dtype)
        for tokens, heads in ((call.queries, call.heads), (call.keys, call.kv_heads), (call.keys, call.kv_heads))
    )
    for name in plugins(seqpar.local):
        work = partial(load_local(name), q, k, v)
        if name != "reference":
            ms, _ = attempt(partial(_usable_ms, name, case, work), case.mesh, ValueError, RuntimeError)
            times |= {} if ms is None else {name: [ms]}
    found = slowest(times, case.mesh)
    return min(found, key=lambda name: found[name]["median"])


def _usable_ms(name: str, case: Case, work: Callable[[], object]) -> float:
    choose_local(name, case.mesh.device, case.dtype, case.model.work.head_dim)
    work()
    return timed(work, 5)


# Results ----------------------------------------------------------------------------------------------------------


def _allocated(device: torch.device) -> float:
    """Return the most bytes that torch's allocator gave out since the last row."""
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0


def free(device: torch.device) -> None:
    """Free what a row held, so that the next one starts from the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _trace(step: Callable[[], object], mesh: Mesh) -> dict[str, Any]:
    """Return ms of a call by kind of kernel, and (kernel, calls, ms) of the kernels that take the most time."""
    mesh.collect(None, None)
    spans = traced(step, TRACED_STEPS)
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, start, end in spans:
        by_name[name].append((end - start) / 1e3)
    kernels = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TRACED_KERNELS]
    parts = {kind: us / 1e3 / TRACED_STEPS for kind, us in split(spans).items()}
    listed = [(name, len(ms) / TRACED_STEPS, sum(ms) / TRACED_STEPS) for name, ms in kernels]
    return {"split_ms": parts, "kernels": listed}


def _line(
    case: Case, row: Row, ms: Mapping[str, float] | None = None, reference: Mapping[str, float] | None = None
) -> Line:
    """Return the JSON line of a row."""
    model, device = case.model, case.mesh.device
    about = {"model": model.name, "tokens": model.tokens, "text": model.text, "kind": row.kind, "way": row.name}
    about |= {"dtype": str(case.dtype).removeprefix("torch."), **row.case}
    made: Line = {"bench": "calls", "case": about, "gpus": case.mesh.world.size, "ms": ms}
    if ms is not None and reference is not None:
        flops = row.branches * case.flops
        made |= {"ceiling_ms": reference, "over_ceiling": ms["median"] / reference["median"] / row.branches}
        made |= {"tflops": flops / ms["median"] / 1e9, "roofline_ms": roofline(flops, 0.0)}
    return made | {"command": command(), "env": environment(device)}


def shown(line: Line) -> str:
    """Return one line of the table, and the kernels of a row that was traced."""
    name, ms = line["case"]["way"], line["ms"]
    if ms is None:
        return f"{name:<58} {'' if line['refused'] == LATE else 'not possible: '}{line['refused']}"
    told = (
        f"{name:<58} {ms['median']:9.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})  {line['over_ceiling']:.3f} x ceiling "
        f"{line['ceiling_ms']['median']:.3f}  {line['tflops']:5.0f} TFLOP/s  {line['gib']:5.1f} GiB"
    )
    told += f"  error {line['error']:.1e}" if "error" in line else ""
    told += f"  table {line['table_ms_a_step']:.2f} ms a step more" if "table_ms_a_step" in line else ""
    if "split_ms" in line:
        told += "\n  of which, ms: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in line["split_ms"].items())
        told += "".join(f"\n  {ms:8.3f} ms {count:6.1f} x  {name[:100]}" for name, count, ms in line["kernels"])
    return told


def table(case: Case, lines: Sequence[Line]) -> str:
    """Return the table of all rows, without traces."""
    model, world = case.model, case.mesh.world.size
    text = f"{model.tokens} tokens{' + ' + str(model.text) + ' text'}"
    head = f"{model.name}, {text}, {world} x {case.mesh.device.type}, {case.flops * world / 1e12:.1f} TFLOP a call"
    left = [line["case"]["way"] for line in lines if line.get("refused") == LATE]
    head += f"; {len(left)} of {len(lines)} rows left out, because --minutes were over" if left else ""
    return "\n".join([head, *(shown({k: v for k, v in line.items() if k != "split_ms"}) for line in lines)])
