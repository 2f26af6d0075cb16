"""A profile as text: a table of steps and blocks, the rates beside the machine's, and the largest losses."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from seqpar.profiling.result import Profile, by_class
from seqpar.profiling.trace import NAMES, OUTSIDE, Columns

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


# colours that people with colour blindness can tell apart (Okabe and Ito)
COLOURS = {
    "products": "#0072B2",
    "attention": "#56B4E9",
    "elementwise": "#009E73",
    "exposed": "#E69F00",
    "waiting": "#D55E00",
    "gaps": "#BBBBBB",
}
HIDDEN = "exchange, hidden"
LABELS = {"exposed": "exchange, exposed", "waiting": "waiting for a rank"}
TICKS = 14  # at most, under the blocks of a class
MANY = 4  # blocks of a class that has bars of its own
REST = "rest"
Groups = dict[str, list[tuple[str, Columns]]]
"""Name -> (label, columns) of each bar."""


def check_drawable() -> None:
    """Raise ValueError if there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise ValueError("profile plots require matplotlib: pip install matplotlib")


def drawn(profile: Profile) -> bytes:
    """Return the picture as a PNG."""
    from matplotlib.figure import Figure  # an extra, which no other command needs

    count = len(profile.ranks)
    figure = Figure(figsize=(13, 1.6 + 2.6 * count), layout="constrained", dpi=110)
    axes = figure.subplots(count, 2, squeeze=False, width_ratios=(1, 3), sharey="col")
    for rank, (left, right) in zip(profile.ranks, axes, strict=True):
        steps = {"step": [(str(step + 1), profile.step(rank, step)) for step in profile.steps]}
        _bars(left, steps, f"rank {rank}: steps")
        _bars(right, grouped(profile.blocks(rank)), f"rank {rank}: blocks, mean of {len(profile.steps)} steps")
        left.set_ylabel("ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def grouped(blocks: dict[str, Columns]) -> Groups:
    """Return class of blocks -> (number, columns) of each; what is of a small class is in one bar, the rest."""
    kinds = defaultdict[str, list[tuple[str, Columns]]](list)
    for block, columns in blocks.items():
        kind, _, number = block.rpartition(" ")
        kinds[kind].append((number, columns))
    rest = [columns for every in kinds.values() if len(every) < MANY for _, columns in every]
    large = {kind: every for kind, every in kinds.items() if len(every) >= MANY}
    return {"": [(REST, sum(rest, Columns()))], **large}


def _bars(axis: Any, groups: Groups, title: str) -> None:
    """Draw a stacked bar for each entry of each group, and beside it a thin one for hidden exchanges."""
    places, ticks, start = list[int](), dict[int, str](), 0
    for name, entries in groups.items():
        mine = range(start, start + len(entries))
        every = -(-len(entries) // TICKS)
        shown = zip(mine[::every], entries[::every], strict=True)
        ticks |= {place: number for place, (number, _) in shown}
        middle, below = (mine[0] + mine[-1]) / 2, axis.get_xaxis_transform()
        axis.text(middle, -0.13, name, ha="center", va="top", fontsize=9, transform=below)
        places, start = [*places, *mine], mine[-1] + 2
    _stacked(axis, places, [columns for entries in groups.values() for _, columns in entries])
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xticks(list(ticks), ticks.values(), fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylim(bottom=0, auto=True)


def _stacked(axis: Any, places: list[int], every: list[Columns]) -> None:
    below = [0.0] * len(every)
    for name in NAMES:
        heights = [getattr(columns, name) for columns in every]
        axis.bar(places, heights, 0.7, below, color=COLOURS[name], label=LABELS.get(name, name))
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    hidden = [columns.hidden for columns in every]
    beside, look = [place + 0.42 for place in places], {"edgecolor": COLOURS["exposed"], "hatch": "////"}
    axis.bar(beside, hidden, 0.12, color="white", linewidth=[bool(each) for each in hidden], **look, label=HIDDEN)


TITLES = {
    "wall": "ms",
    "products": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "hidden": "hidden",
    "exposed": "exposed",
    "waiting": "waiting",
    "gaps": "gaps",
}

TOLERANCE = 1.05  # of a rate: beyond it is no noise


def report(profile: Profile) -> str:
    """Return the text that `seqpar profile` prints."""
    return "\n".join([*_table(profile), "", *_rates(profile), *_losses(profile), *_notes(profile)])


def facts(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain values, without the single blocks and steps, which `rows` has."""
    rates = [
        {**asdict(rate), "achieved": [rate.achieved(profile.mean(rank)) for rank in profile.ranks]}
        for rate in profile.rates
    ]
    means = [asdict(profile.mean(rank)) | {"wall": profile.mean(rank).wall} for rank in profile.ranks]
    every = {"losses": [asdict(loss) for loss in losses(profile)], "notes": profile.notes, "graph": profile.graph}
    late = [{str(rank): ms for rank, ms in each.items()} for each in profile.late]
    plan = None if profile.plan is None else str(profile.plan)
    return {"plan": plan, "mean_ms": means, "late_ms": late, "rates": rates, "clock_us": profile.clock_us, **every}


def rows(profile: Profile) -> str:
    """Return every block of every step and rank as comma-separated values, in ms."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rank", "step", "block", *TITLES])
    for row in profile.rows:
        values = (f"{getattr(row.columns, column):.6f}" for column in TITLES)
        table.writerow([row.rank, row.step + 1, row.block, *values])
    return text.getvalue()


def _table(profile: Profile) -> list[str]:
    """Return a line for each step and its mean, and one for each class of blocks."""
    head = "".join(f"{title:>12}" for title in TITLES.values())
    lines = [f"{'rank':<5}{'step or blocks':<34}{head}"]
    for rank in profile.ranks:
        lines += [_line(rank, f"step {step + 1}", profile.step(rank, step)) for step in profile.steps]
        lines.append(_line(rank, "mean", profile.mean(rank)))
        for kind, each in by_class(profile.blocks(rank)).items():
            lines.append(_line(rank, f"  {kind}", sum(each, Columns())))
    return [*lines, "hidden: exchanges behind which something computes; the other columns add up to the ms."]


def _line(rank: int, name: str, columns: Columns) -> str:
    values = "".join(f"{getattr(columns, column):12.3f}" for column in TITLES)
    return f"{rank:<5}{name[:33]:<34}{values}"


def _rates(profile: Profile) -> Iterable[str]:
    """Return a line for each rate of rank 0, which has the most tokens."""
    mean = profile.mean(0)
    for rate in profile.rates:
        if (achieved := rate.achieved(mean)) is not None:
            amount = f"{rate.amount:.3g} {'GFLOP' if 'FLOP' in rate.unit else 'MB'} a step"
            share = f"{achieved / rate.ceiling:.0%}"
            yield f"{rate.column:<12}{achieved:8.3g} of {rate.ceiling:.3g} {rate.unit} ({share}; {amount})"
    if profile.rates:
        yield f"rates       {profile.source}"


def _losses(profile: Profile) -> list[str]:
    found = losses(profile)
    lines = [f"{number}. {loss.text}." for number, loss in enumerate(found, start=1)]
    return ["", "The largest losses:", *lines]


def _notes(profile: Profile) -> list[str]:
    bound = f"by what the meetings of the ranks show, their clocks differ by at most {profile.clock_us:.0f} us"
    notes = [*profile.notes, *above(profile), *([bound] if len(profile.ranks) > 1 else ())]
    return [f"note: {note}" for note in notes]


def above(profile: Profile) -> Iterable[str]:
    """Yield why elementwise kernels are faster than a copy, where they are: the formula counts more than they move."""
    mean = profile.mean(0)
    for rate in profile.rates:
        if rate.column == "elementwise" and (rate.achieved(mean) or 0.0) > rate.ceiling * TOLERANCE:
            yield (
                "elementwise work above the rate of copies: some of the bytes that the formula counts stay in the "
                "GPU's cache, or their work is done inside of matrix products"
            )
