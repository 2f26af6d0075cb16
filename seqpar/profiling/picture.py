"""A picture of a profile: a row for each rank, its steps on the left and its blocks on the right, as stacked bars."""

from __future__ import annotations

import io
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

from seqpar.profiling.columns import NAMES, Columns
from seqpar.profiling.result import Profile

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
TITLES = {"exposed": "exchange, exposed", "waiting": "waiting for a rank"}
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
        axis.bar(places, heights, 0.7, below, color=COLOURS[name], label=TITLES.get(name, name))
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    hidden = [columns.hidden for columns in every]
    beside, look = [place + 0.42 for place in places], {"edgecolor": COLOURS["exposed"], "hatch": "////"}
    axis.bar(beside, hidden, 0.12, color="white", linewidth=[bool(each) for each in hidden], **look, label=HIDDEN)
