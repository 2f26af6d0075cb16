"""Reads one rank's torch.profiler trace: what ran in each step, and in which block of the model. Times are in us.

On a GPU, events are kernels and copies. A kernel belongs to the step and the block in which the host launched it. A
replayed CUDA graph belongs to one step as a whole; the blocks of its kernels follow from their order. On a CPU, events
are the outermost torch operations on the thread that runs the steps, and gloo's exchanges on any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

STEP, BLOCK, CLOCK = "seqpar step ", "seqpar block ", "seqpar clock"  # names of our spans in a trace
OUTSIDE = "outside"  # the block of events that run in no block
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STARTS = "c10d::"  # host calls that start an exchange, which is a separate event
GRAPH = "GraphLaunch"  # host calls that replay a graph
ORDERED = ("products", "attention", "elementwise", "store")  # kernels that run in the same order in every step
ENOUGH = 0.9  # share of a known run's kernels that a replay must have at their places
LONGEST = 60  # characters of a kernel's name

What = Literal["products", "attention", "elementwise", "exchange", "copy", "store"]
"""What an event does. exchange: sends or receives, or waits until other ranks have sent. copy: sends, and waits for no
rank. store: an elementwise kernel that may write into other ranks' memory, and at its end wait until they have."""

# parts of lower-case names, in the order in which they are tried
WORDS: tuple[tuple[What, tuple[str, ...]], ...] = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "weights_kernel", "parts_kernel")),
    ("exchange", ("nccl", "gloo:", "flags_kernel", "take_kernel")),
    ("copy", ("memcpy ptop", "memcpy dtod")),  # inside blocks the latter is a copy into another rank's memory, too
    ("store", ("prepare_kernel", "prepare8_kernel", "push_kernel", "send_kernel")),
    (
        "products",
        (
            *("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "dgrad", "fprop", "convolve", "winograd"),
            *("::linear", "::addmm", "::mm", "::bmm", "::matmul", "::baddbmm", "::addbmm", "::conv", "::einsum"),
            "::_scaled_mm",
        ),
    ),
)


def what_of(name: str) -> What:
    lower = name.lower()
    for what, words in WORDS:
        if any(word in lower for word in words):
            return what
    return "elementwise"


@dataclass(frozen=True)
class Event:
    """Something that ran. graph: number of its replay, 0 without one. block: "" if unknown."""

    name: str
    what: What
    start: float
    end: float
    step: int
    block: str = ""
    graph: int = 0


@dataclass(frozen=True)
class HostSpan:
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    """The measured steps of one rank.

    base_ns: the moment from which its times count. clocks: (start, end) of the meetings of all ranks. steps: number ->
    (start, end). marks: where blocks begin. notes: for readers of the report.
    """

    base_ns: int
    clocks: tuple[tuple[float, float], ...]
    steps: dict[int, tuple[float, float]]
    events: tuple[Event, ...]
    marks: tuple[tuple[float, str], ...]
    notes: tuple[str, ...] = ()


class Spans:
    """Spans that do not overlap, in order."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        self.all = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in self.all]

    def at(self, moment: float) -> HostSpan | None:
        """The span that contains a moment, or None."""
        place = bisect_right(self._starts, moment) - 1
        return self.all[place] if place >= 0 and moment < self.all[place].end else None


def spans(trace: Mapping[str, Any], prefix: str) -> Spans:
    """Our spans of a kind, without the prefix in their names."""
    return Spans(
        HostSpan(event["name"].removeprefix(prefix), event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefix)
    )


def read(recorded: Mapping[str, Any], first: int) -> RankTrace:
    """Read a trace of torch.profiler; the steps before `first` only show the order of each block's kernels."""
    blocks, on_gpu = spans(recorded, BLOCK), any(event.get("cat") in ON_GPU for event in recorded["traceEvents"])
    # the number of a run before a block's name tells its runs apart
    runs = Spans(replace(span, name=f"{number} {span.name}") for number, span in enumerate(blocks.all))
    events = events_of(recorded, runs)
    known = _last_runs(event for event in events if event.step < first and not event.graph)
    measured = [replace(event, block=_block_of(event.block)) for event in events if event.step >= first]
    measured, notes = _with_blocks(measured, known)
    windows = {step: window for step, window in _windows(recorded, measured, on_gpu).items() if step >= first}
    met = tuple((span.start, span.end) for span in spans(recorded, CLOCK).all)
    marks = _marks(measured, blocks, on_gpu)
    short = tuple(replace(event, name=event.name[:LONGEST]) for event in measured)
    return RankTrace(recorded["baseTimeNanoseconds"], met, windows, short, marks, notes)


def trimmed(trace: Mapping[str, Any], first: int) -> dict[str, Any]:
    """A trace without everything before the measured steps and the meetings that precede them."""
    begin = min(
        span.start for span in (*spans(trace, CLOCK).all, *spans(trace, STEP).all) if span.name in ("", f"{first}")
    )
    kept = [event for event in trace["traceEvents"] if event["ph"] == "M" or event.get("ts", begin) >= begin]
    return {**trace, "traceEvents": kept}


# Events, steps and blocks ------------------------------------------------------------------------------------------


def events_of(trace: Mapping[str, Any], blocks: Spans) -> list[Event]:
    """The events of all steps of a trace, by their start."""
    steps, complete = spans(trace, STEP), [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = [event for event in complete if event.get("cat") in ON_GPU]
    # (event, moment at which the host launched it, replay)
    found = _launched(complete, on_gpu) if on_gpu else ((event, event["ts"], 0) for event in _called(complete))
    events = list[Event]()
    for event, launched, graph in found:
        if (step := steps.at(launched)) is not None:
            span, (name, start) = blocks.at(launched), (event["name"], event["ts"])
            block = "" if graph else OUTSIDE if span is None else span.name
            events.append(Event(name, what_of(name), start, start + event["dur"], int(step.name), block, graph))
    return sorted(events, key=lambda event: event.start)


def _launched(complete: Sequence[Any], on_gpu: Sequence[Any]) -> Iterator[tuple[Any, float, int]]:
    def number(event: Any) -> int:  # what a kernel and its launch have in common
        return event.get("args", {}).get("correlation", 0)

    calls = {number(event): event for event in complete if event.get("cat") in LAUNCHES}
    for event in on_gpu:
        call = calls.get(number(event))
        if call is not None and number(event):
            yield event, call["ts"], number(event) if GRAPH in call["name"] else 0


def _called(complete: Sequence[Any]) -> Iterator[Any]:
    threads = {event["tid"] for event in complete if event["name"].startswith(STEP)}
    local = (event for event in complete if event.get("cat") == "cpu_op" and event["tid"] in threads)
    until = float("-inf")
    for event in sorted(local, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= until:
            until = event["ts"] + event["dur"]
            if not event["name"].startswith(STARTS):
                yield event
    yield from (event for event in complete if event["name"].startswith("gloo:"))


def _windows(trace: Mapping[str, Any], events: Sequence[Event], on_gpu: bool) -> dict[int, tuple[float, float]]:
    """Step -> (start, end): on a GPU from its first kernel to that of the next step, on a CPU as the host's."""
    if not on_gpu:
        return {int(span.name): (span.start, span.end) for span in spans(trace, STEP).all}
    firsts, last = dict[int, float](), 0.0
    for event in events:
        firsts.setdefault(event.step, event.start)
        last = max(last, event.end)
    starts = sorted(firsts.items())
    ends = [start for _, start in starts[1:]] + [last]
    return {step: (start, end) for (step, start), end in zip(starts, ends, strict=True)}


def _marks(events: Sequence[Event], blocks: Spans, on_gpu: bool) -> tuple[tuple[float, str], ...]:
    """Where blocks begin: on a CPU where the host enters and leaves them, on a GPU after the kernel before them."""
    if not on_gpu:
        return tuple(mark for span in blocks.all for mark in ((span.start, span.name), (span.end, OUTSIDE)))
    marks, until, block = list[tuple[float, str]](), events[0].start if events else 0.0, ""
    for event in events:
        if event.block and event.block != block:
            block = event.block
            marks.append((min(until, event.start), block))  # so that the gap before a block is its own
        until = max(until, event.end)
    return tuple(marks)


# Blocks of replayed graphs -----------------------------------------------------------------------------------------


def _block_of(run: str) -> str:
    return run.partition(" ")[2] if run[:1].isdecimal() else run


def _last_runs(events: Iterable[Event]) -> list[tuple[str, str]]:
    """(kernel, block) of each block's last run: earlier runs may contain kernels that tune themselves."""
    runs: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.block not in ("", OUTSIDE) and event.what in ORDERED:
            runs[event.block].append(event)
    last = {_block_of(run): kernels for run, kernels in sorted(runs.items(), key=lambda x: x[1][0].start)}
    return [(event.name, block) for block, kernels in last.items() for event in kernels]


def _with_blocks(events: Sequence[Event], known: Sequence[tuple[str, str]]) -> tuple[list[Event], tuple[str, ...]]:
    """Give the events of replays the blocks of a known run, and exchanges that of the event before them."""
    blocks, notes, seen = dict[int, str](), (), dict[tuple[str, ...], list[str] | None]()
    replayed = [(event.graph, index) for index, event in enumerate(events) if event.graph and event.what in ORDERED]
    for _, group in groupby(sorted(replayed), key=lambda pair: pair[0]):
        indices = [index for _, index in group]
        names = tuple(events[index].name for index in indices)
        if names not in seen:
            seen[names] = _by_order(known, names)
        if (found := seen[names]) is None:
            notes = ("blocks of replayed graphs are unknown: their kernels match no recorded order",)
        else:
            blocks.update(zip(indices, found, strict=True))
    attributed, last = list[Event](), OUTSIDE
    for index, event in enumerate(events):
        last = blocks.get(index, last if event.graph else event.block)
        attributed.append(replace(event, block=last))
    return attributed, notes


def _by_order(known: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str] | None:
    """The block of each kernel by the longest common subsequence with a known run; None if they match too little."""
    pairs = _common([name for name, _ in known], names)
    if not pairs or len(pairs) < ENOUGH * min(len(known), len(names)):
        return None
    matched, last = {ours: known[theirs][1] for theirs, ours in pairs}, pairs[-1][1]
    found, block = list[str](), OUTSIDE
    for index in range(len(names)):  # a kernel between two of the subsequence belongs to the first one's block
        block = matched.get(index, block if index < last else OUTSIDE)
        found.append(block)
    return found


def _common(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """The indices of a longest common subsequence in both, as early as possible."""
    codes = {name: code for code, name in enumerate(dict.fromkeys((*first, *second)))}
    rows, columns = (np.array([codes[name] for name in names]) for names in (first, second))
    lengths = np.zeros((len(rows) + 1, len(columns) + 1), dtype=np.int32)
    for row, code in enumerate(rows, start=1):
        before = lengths[row - 1]
        lengths[row, 1:] = np.maximum.accumulate(np.maximum(before[1:], before[:-1] + (columns == code)))
    pairs, (row, column) = list[tuple[int, int]](), (len(rows), len(columns))
    while lengths[row, column]:
        if lengths[row, column - 1] == lengths[row, column]:
            column -= 1
        elif lengths[row - 1, column] == lengths[row, column]:
            row -= 1
        else:
            row, column = row - 1, column - 1
            pairs.append((row, column))
    return pairs[::-1]
