"""The largest losses of a profile in words, each with what would remove it.

What a rank loses is the time in which it computes nothing, the time of elementwise kernels, and what products and
attention take beyond the machine's best rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seqpar.profiling.columns import NAMES, OUTSIDE, Columns
from seqpar.profiling.result import Profile, by_class

WORK = ("products", "attention", "elementwise", "gaps")  # what can make a rank late
NOTABLE = 0.3  # of a wait: what explains less of it is not named
LESS = 0.9  # of the predicted exchanges: a layout that has more is not named


@dataclass(frozen=True)
class Loss:
    """A loss of one rank in a step. ms: a step."""

    column: str
    rank: int
    ms: float
    text: str


def losses(profile: Profile, count: int = 3) -> list[Loss]:
    """Return the largest losses, largest first."""
    every = [(column, *_lost(profile, column)) for column in NAMES]
    largest = sorted((each for each in every if each[2] > 0), key=lambda each: -each[2])[:count]
    return [Loss(*each, _text(profile, *each)) for each in largest]


def _lost(profile: Profile, column: str) -> tuple[int, float]:
    """Return the rank that has most of a column, and the ms of it that are lost."""
    rank = max(profile.ranks, key=lambda rank: getattr(profile.mean(rank), column))
    spent = getattr(profile.mean(rank), column)
    if column not in ("products", "attention"):
        return rank, spent
    best = {rate.column: rate.least_ms for rate in profile.rates}
    return rank, max(0.0, spent - best.get(column, spent))


def _text(profile: Profile, column: str, rank: int, ms: float) -> str:
    mean = profile.mean(rank)
    words = {
        "products": _products,
        "attention": _attention,
        "elementwise": _elementwise,
        "exposed": _exposed,
        "waiting": _waiting,
        "gaps": _gaps,
    }
    return f"{ms:.3g} ms of {mean.wall:.4g} ms a step on rank {rank}: {words[column](profile, rank, mean)}"


def _rate(profile: Profile, column: str, mean: Columns) -> str:
    rate = next((each for each in profile.rates if each.column == column), None)
    achieved = None if rate is None else rate.achieved(mean)
    if rate is None or achieved is None:
        return ""
    if achieved > rate.ceiling:  # see `above` in seqpar/profiling/report.py
        return f" at the {rate.ceiling:.3g} {rate.unit} of this machine"
    return f" at {achieved:.3g} of {rate.ceiling:.3g} {rate.unit}"


def _most(profile: Profile, rank: int, column: str) -> str:
    """Return where most of a column is, as text."""
    where, ms = _place({block: getattr(each, column) for block, each in profile.blocks(rank).items()})
    return f"most of it {where} ({ms:.3g} ms)"


def _place(blocks: Mapping[str, float]) -> tuple[str, float]:
    """Return in which block most of a time is, or, if none has half of it, in the blocks of which class; and how much.

    blocks: block -> its part of the time.
    """
    whole = {kind: sum(each) for kind, each in by_class(blocks).items()}
    largest = max(blocks, key=lambda block: blocks[block])
    if 2 * blocks[largest] < sum(blocks.values()):
        blocks, largest = whole, max(whole, key=lambda kind: whole[kind])
    return "outside of blocks" if largest == OUTSIDE else f"in {largest}", blocks[largest]


def _products(profile: Profile, rank: int, mean: Columns) -> str:
    return (
        f"matrix products run{_rate(profile, 'products', mean)}; larger ones (more pictures a rank, fewer ranks a "
        f"picture) come nearer to that, and fewer bits would raise it"
    )


def _attention(profile: Profile, rank: int, mean: Columns) -> str:
    return (
        f"attention runs{_rate(profile, 'attention', mean)}; a faster --local-attention, or fewer and larger calls, "
        f"would remove it"
    )


def _elementwise(profile: Profile, rank: int, mean: Columns) -> str:
    return (
        f"elementwise work{_rate(profile, 'elementwise', mean)}, {_most(profile, rank, 'elementwise')}; fused kernels, "
        f"which pass over the tokens less often, would remove a part of it"
    )


def _exposed(profile: Profile, rank: int, mean: Columns) -> str:
    plan, ways = profile.plan, list[str]()
    if plan is not None:
        mine = plan.ranking.ranked[0]
        least = min(plan.ranking.ranked, key=lambda row: row.exchange)
        if least.exchange < LESS * mine.exchange:
            how = f"{least.layout} by {least.layout.strategy}" if least.layout.sequence > 1 else f"{least.layout}"
            ways.append(f"{how}, predicted to exchange for {least.exchange:.3g} ms in place of {mine.exchange:.3g},")
        if plan.transport.name == "collective" and _is_gpu(profile):
            ways.append("the peer transport, which needs no collective,")
    remedy = " or ".join(ways) or "fewer ranks a picture, or faster links,"
    return (
        f"exchanges behind which nothing computes{_rate(profile, 'exchange', mean)}, "
        f"{_most(profile, rank, 'exposed')}; {remedy} would remove some of it"
    )


def _waiting(profile: Profile, rank: int, mean: Columns) -> str:
    late = max(profile.late[rank], key=lambda other: profile.late[rank][other], default=rank)
    text = f"it waits for rank {late}, {_most(profile, rank, 'waiting')}"
    others, mine = profile.mean(late), profile.mean(rank)
    more = {column: getattr(others, column) - getattr(mine, column) for column in WORK}
    column = max(more, key=lambda column: more[column])
    if late == rank or more[column] < NOTABLE * mean.waiting:
        return f"{text}; the ranks are late in turn, so that steadier ones would remove it (other work on their hosts?)"
    theirs, ours = profile.blocks(late), profile.blocks(rank)
    apart = {
        block: getattr(each, column) - getattr(ours.get(block, Columns()), column) for block, each in theirs.items()
    }
    where, ms = _place(apart)
    return (
        f"{text}; rank {late} has {more[column]:.3g} ms more {column}, of it {ms:.3g} ms {where}: "
        f"without that it would be in time"
    )


def _gaps(profile: Profile, rank: int, mean: Columns) -> str:
    text = f"nothing runs, {_most(profile, rank, 'gaps')}"
    if profile.graph:
        return f"{text}; fewer, larger kernels would remove these times between the kernels of a graph"
    remedy = (
        "a step as a CUDA graph needs no host between its kernels"
        if _is_gpu(profile)
        else "a CPU runs Python between operations: more tokens or pictures a rank would make its share smaller"
    )
    return f"{text}; {remedy}"


def _is_gpu(profile: Profile) -> bool:
    return profile.plan is not None and profile.plan.ranking.rates.device != "CPU"
