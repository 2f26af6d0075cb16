"""Brings the traces of all ranks onto one clock, and joins them into one trace that Perfetto opens.

While they are traced, all ranks meet several times in a small exchange on the host. Nobody leaves one before everyone
has come, so that each meeting bounds how far two clocks can be apart, from both sides; where the bounds of all meetings
overlap lies the offset, with half of that length as its error. Clocks that may be equal are taken as equal, as those of
one host are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seqpar.profiling.trace import RankTrace

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
