"""Reads a trace of torch.profiler: what ran in each step on this rank, and in which block of the model.

On a GPU events are its kernels and copies. Each belongs to the step in which the host launched it, a replayed graph as
a whole; its block is the one in which the host launched it, or, in a graph, the one at its place in the order of
kernels (`seqpar.profiling.order`). On a CPU events are the outermost operations of torch on the thread of the steps,
and the exchanges of gloo on any thread. Times are in us.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqpar.profiling.columns import OUTSIDE
from seqpar.profiling.kinds import What, what_of

PREFIX = "seqpar "
STEP, BLOCK, CLOCK = f"{PREFIX}step ", f"{PREFIX}block ", f"{PREFIX}clock"  # names of our spans in a trace
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STARTS = "c10d::"  # in the name of the host's calls that start an exchange, which has an event of its own
GRAPH = "GraphLaunch"  # in the name of the host's call that replays a graph


@dataclass(frozen=True)
class Event:
    """Something that ran. graph: the replay that it belongs to, 0 without one. block: "" where that is not known."""

    name: str
    what: What
    start: float
    end: float
    step: int
    block: str = ""
    graph: int = 0


@dataclass(frozen=True)
class HostSpan:
    """A named part of the host's time."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    """What one rank's trace tells.

    base_ns: the moment from which its times count. clocks: the exchanges in which all ranks have met. steps: number ->
    (start, end) of each step. marks: where blocks begin. notes: what a reader should know.
    """

    base_ns: int
    clocks: tuple[tuple[float, float], ...]
    steps: dict[int, tuple[float, float]]
    events: tuple[Event, ...]
    marks: tuple[tuple[float, str], ...]
    notes: tuple[str, ...] = ()


class Spans:
    """Spans that do not overlap, to look moments up in."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        self.all = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in self.all]

    def at(self, moment: float) -> HostSpan | None:
        """Return the span that contains a moment, or None."""
        place = bisect_right(self._starts, moment) - 1
        return self.all[place] if place >= 0 and moment < self.all[place].end else None


def spans(trace: Mapping[str, Any], prefix: str) -> Spans:
    """Return our spans of a kind, without the prefix in their names."""
    return Spans(
        HostSpan(each["name"].removeprefix(prefix), each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each.get("cat") == "user_annotation" and each["name"].startswith(prefix)
    )


def events(trace: Mapping[str, Any], blocks: Spans) -> list[Event]:
    """Return what ran in the steps of a trace, in order of its start."""
    steps, complete = spans(trace, STEP), [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    on_gpu = [each for each in complete if each.get("cat") in ON_GPU]
    found = _launched(complete, on_gpu, steps, blocks) if on_gpu else _called(trace, complete, steps, blocks)
    return sorted(found, key=lambda event: event.start)


def _launched(
    complete: Sequence[Mapping[str, Any]], on_gpu: Sequence[Mapping[str, Any]], steps: Spans, blocks: Spans
) -> Iterator[Event]:
    """Yield what ran on the GPU and was launched in a step."""
    calls = {_launch_of(each): each for each in complete if each.get("cat") in LAUNCHES}
    for each in on_gpu:
        number = _launch_of(each)
        call = calls.get(number)
        step = None if call is None or not number else steps.at(call["ts"])
        if call is not None and step is not None:
            graph = number if GRAPH in call["name"] else 0
            block = blocks.at(call["ts"])
            yield _event(each, step, OUTSIDE if block is None else block.name, graph)


def _launch_of(each: Mapping[str, Any]) -> int:
    """Return the number that a kernel and its launch have in common; 0 where there is none."""
    return each.get("args", {}).get("correlation", 0)


def _called(
    trace: Mapping[str, Any], complete: Sequence[Mapping[str, Any]], steps: Spans, blocks: Spans
) -> Iterator[Event]:
    """Yield the outermost operations on the thread of the steps, and the exchanges of gloo."""
    threads = {each["tid"] for each in complete if each["name"].startswith(STEP)}
    mine = (each for each in complete if each.get("cat") == "cpu_op" and each["tid"] in threads)
    until = float("-inf")
    for each in sorted(mine, key=lambda each: (each["ts"], -each["dur"])):
        if each["ts"] >= until:
            until = each["ts"] + each["dur"]
            if not each["name"].startswith(STARTS):
                yield from _in_step(each, steps, blocks)
    for each in complete:
        if each["name"].startswith("gloo:"):
            yield from _in_step(each, steps, blocks)


def _in_step(each: Mapping[str, Any], steps: Spans, blocks: Spans) -> Iterator[Event]:
    step, block = steps.at(each["ts"]), blocks.at(each["ts"])
    if step is not None:
        yield _event(each, step, OUTSIDE if block is None else block.name, 0)


def _event(each: Mapping[str, Any], step: HostSpan, block: str, graph: int) -> Event:
    name, start = each["name"], each["ts"]
    return Event(name, what_of(name), start, start + each["dur"], int(step.name), "" if graph else block, graph)


def is_on_gpu(trace: Mapping[str, Any]) -> bool:
    """Return whether anything ran on a GPU."""
    return any(each.get("cat") in ON_GPU for each in trace["traceEvents"])


def windows(trace: Mapping[str, Any], ran: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """Return step -> (start, end): on a GPU from its first kernel to that of the next step, on a CPU as the host's."""
    if not is_on_gpu(trace):
        return {int(span.name): (span.start, span.end) for span in spans(trace, STEP).all}
    firsts, last = dict[int, float](), 0.0
    for event in ran:
        firsts.setdefault(event.step, event.start)
        last = max(last, event.end)
    starts = sorted(firsts.items())
    ends = [start for _, start in starts[1:]] + [last]
    return {step: (start, end) for (step, start), end in zip(starts, ends, strict=True)}


def marks(ran: Sequence[Event], blocks: Spans, on_gpu: bool) -> tuple[tuple[float, str], ...]:
    """Return where blocks begin: on a CPU where the host enters and leaves them.

    On a GPU a block begins where the kernel before its first one ends, so that the gap before it is its own.
    """
    if not on_gpu:
        return tuple(mark for span in blocks.all for mark in ((span.start, span.name), (span.end, OUTSIDE)))
    found, until, block = list[tuple[float, str]](), ran[0].start if ran else 0.0, ""
    for event in ran:
        if event.block and event.block != block:
            block = event.block
            found.append((min(until, event.start), block))
        until = max(until, event.end)
    return tuple(found)


def trimmed(trace: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return a trace without what was before the measured steps, and before the meetings of ranks at their start."""
    begin = min(
        span.start for span in (*spans(trace, CLOCK).all, *spans(trace, STEP).all) if span.name in ("", f"{first}")
    )
    kept = [each for each in trace["traceEvents"] if each["ph"] == "M" or each.get("ts", begin) >= begin]
    return {**trace, "traceEvents": kept}


def renamed(ran: Iterable[Event]) -> tuple[Event, ...]:
    """Return events without the names that only one rank needs, which makes them short to send."""
    return tuple(
        replace(each, name=each.name[:60] if each.what in ("exchange", "store", "copy") else "") for each in ran
    )
