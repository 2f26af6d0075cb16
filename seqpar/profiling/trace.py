"""Reads a trace of torch.profiler: what ran in each step on this rank, and in which block of the model.

On a GPU events are its kernels and copies. Each belongs to the step in which the host launched it, a replayed graph as
a whole; its block is the one in which the host launched it, or, in a graph, the one at its place in the order of
kernels (`seqpar.profiling.result`). On a CPU events are the outermost operations of torch on the thread of the steps,
and the exchanges of gloo on any thread. Times are in us.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Kind = Literal["products", "attention", "elementwise", "exchange", "waiting"]
COMPUTES: tuple[Kind, ...] = ("products", "attention", "elementwise")
ORDER: tuple[Kind, ...] = (*COMPUTES, "exchange", "waiting")
OUTSIDE = "outside"  # the block of what runs in none
Marks = Sequence[tuple[float, str]]
"""Moments in ascending order, each with the block that holds from then on."""


@dataclass(frozen=True)
class Interval:
    """A time in which something runs."""

    start: float
    end: float
    kind: Kind


@dataclass(frozen=True)
class Columns:
    """Where a time went, all in one unit. exposed: exchanges behind which nothing computes. hidden: those behind which
    something does, which is no part of the sum."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    gaps: float = 0.0
    hidden: float = 0.0

    @property
    def wall(self) -> float:
        """Return the whole time: the sum of all columns but `hidden`."""
        return sum(getattr(self, name) for name in NAMES)

    def __add__(self, other: Columns) -> Columns:
        return Columns(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, factor: float) -> Columns:
        return Columns(*(getattr(self, each.name) * factor for each in fields(self)))


NAMES = tuple(each.name for each in fields(Columns) if each.name != "hidden")


def mean(every: Sequence[Columns]) -> Columns:
    """Return the mean of some columns."""
    return sum(every, Columns()) * (1 / max(1, len(every)))


def columns(intervals: Iterable[Interval], start: float, end: float, marks: Marks = ()) -> dict[str, Columns]:
    """Return block -> columns of the window from `start` to `end`; the sums of all blocks add up to its length."""
    times: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    active, block, before = Counter[str](), OUTSIDE, start
    for moment, change, name in _changes(intervals, start, end, marks):
        if moment > before:
            _add(times[block], active, moment - before)
            before = moment
        if change:
            active[name] += change
        else:
            block = name
    if end > before:
        _add(times[block], active, end - before)
    return {block: Columns(**each) for block, each in times.items()}


def _changes(intervals: Iterable[Interval], start: float, end: float, marks: Marks) -> list[tuple[float, int, str]]:
    """Return (moment, +1 or -1, kind) where intervals begin and end, and (moment, 0, block) where blocks begin."""
    changes = [(max(start, moment), 0, block) for moment, block in marks if moment < end]
    for each in intervals:
        first, last = max(start, each.start), min(end, each.end)
        if first < last:
            changes += [(first, 1, each.kind), (last, -1, each.kind)]
    return sorted(changes, key=lambda change: change[0])


def _add(times: defaultdict[str, float], active: Mapping[str, int], spent: float) -> None:
    """Count a time in which the same kinds are active."""
    kind = next((each for each in ORDER if active[each]), "gaps")
    times["exposed" if kind == "exchange" else kind] += spent
    if kind in COMPUTES and active["exchange"]:
        times["hidden"] += spent


What = Literal["products", "attention", "elementwise", "exchange", "copy", "store"]
"""What an event does. exchange: it sends or receives, or waits until others have sent. copy: it sends and waits for
nobody. store: an elementwise kernel that may write into other ranks' memory, and at its end wait until they have."""

# parts of lower-case names, looked for in this order
ATTENTION = ("flash", "fmha", "sdpa", "attention", "weights_kernel", "parts_kernel")
EXCHANGES = ("nccl", "gloo:", "flags_kernel", "take_kernel")
COPIES = ("memcpy ptop", "memcpy dtod")  # inside of blocks the latter is a copy into memory of another rank, too
STORES = ("prepare_kernel", "push_kernel", "send_kernel")
PRODUCTS = (
    *("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "dgrad", "fprop", "convolve", "winograd"),
    *(
        "::linear",
        "::addmm",
        "::mm",
        "::bmm",
        "::matmul",
        "::baddbmm",
        "::addbmm",
        "::conv",
        "::einsum",
        "::_scaled_mm",
    ),
)
PLAIN: tuple[tuple[What, tuple[str, ...]], ...] = (
    ("attention", ATTENTION),
    ("exchange", EXCHANGES),
    ("copy", COPIES),
    ("store", STORES),
    ("products", PRODUCTS),
)
AS_KIND: dict[What, Kind] = {
    "products": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "exchange": "exchange",
    "copy": "exchange",
    "store": "elementwise",
}


def what_of(name: str) -> What:
    """Return what an event of this name does."""
    lower = name.lower()
    for what, words in PLAIN:
        if any(word in lower for word in words):
            return what
    return "elementwise"


Meetings = Sequence[tuple[float, float]]


def offset(first: Meetings, other: Meetings) -> tuple[float, float]:
    """Return by how much the other clock is ahead of the first one, and by how much this may be wrong at most.

    Each has the (begin, end) of the same meetings by its own clock; ValueError if their numbers differ.
    """
    if len(first) != len(other) or not first:
        raise ValueError(f"got {len(first)} and {len(other)} meetings of two ranks, expected as many, at least one")
    least = max(begin - end for (_, end), (begin, _) in zip(first, other, strict=True))
    most = min(end - begin for (begin, _), (_, end) in zip(first, other, strict=True))
    ahead = 0.0 if least <= 0 <= most else (least + most) / 2
    return ahead, max(abs(most - ahead), abs(least - ahead))


def shifts(ranks: Sequence[RankTrace]) -> tuple[list[float], float]:
    """Return what to add to each rank's times to have them by rank 0's clock, and the largest error; all in us."""
    first, found, worst = ranks[0], [0.0], 0.0
    for other in ranks[1:]:
        base = (other.base_ns - first.base_ns) / 1e3
        ahead, error = offset(first.clocks, [(begin + base, end + base) for begin, end in other.clocks])
        found.append(base - ahead)
        worst = max(worst, error)
    return found, worst


def merged(traces: Sequence[Mapping[str, Any]], moved: Sequence[float]) -> dict[str, Any]:
    """Return one trace of all ranks; moved: what `shifts` returned. Its times begin at zero."""
    starts = [
        each["ts"] + moved[rank] for rank, trace in enumerate(traces) for each in trace["traceEvents"] if _timed(each)
    ]
    first = min(starts, default=0.0)
    every = [x for rank, trace in enumerate(traces) for x in _moved(trace["traceEvents"], rank, moved[rank] - first)]
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": every}


def _timed(each: Mapping[str, Any]) -> bool:
    return each.get("ph") == "X" and "ts" in each


def _moved(events: Sequence[Mapping[str, Any]], rank: int, by: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with numbers of processes and arrows that no other rank has."""
    numbers = {pid: index for index, pid in enumerate(dict.fromkeys(str(each.get("pid")) for each in events))}
    for each in events:
        moved = dict(each, pid=1000 * (rank + 1) + numbers[str(each.get("pid"))])
        if each.get("ph") == "M":
            moved.pop("ts", None)
            if each["name"] == "process_name":
                moved["args"] = {"name": f"rank {rank}: {each['args']['name']}"}
        elif "ts" in each:
            moved["ts"] = each["ts"] + by
        if "id" in each:
            moved["id"] = f"{rank}.{each['id']}"
        yield moved


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
