"""A picture of a profile: a row for each rank, its steps on the left and its blocks on the right, as stacked bars."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

from seqpar.sight.columns import NAMES, Columns
from seqpar.sight.result import Profile

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
TICKS = 16  # at most, under the blocks of a rank


def check_drawable() -> None:
    """Raise ValueError if there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise ValueError("got no matplotlib, expected it for the picture of a profile; pip install 'seqpar[plot]'")


def drawn(profile: Profile) -> bytes:
    """Return the picture as a PNG."""
    from matplotlib.figure import Figure  # an extra, which no other command needs

    count = len(profile.ranks)
    figure = Figure(figsize=(13, 1.6 + 2.6 * count), layout="constrained", dpi=110)
    axes = figure.subplots(count, 2, squeeze=False, width_ratios=(1, 3), sharey="col")
    for rank, (left, right) in zip(profile.ranks, axes, strict=True):
        steps = {str(step + 1): profile.step(rank, step) for step in profile.steps}
        _bars(left, steps, f"rank {rank}: steps")
        _bars(right, profile.blocks(rank), f"rank {rank}: blocks, mean of {len(steps)} steps")
        left.set_ylabel("ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _bars(axis: Any, every: dict[str, Columns], title: str) -> None:
    """Draw a stacked bar for each entry, and beside it a thin one for hidden exchanges."""
    places, below = range(len(every)), [0.0] * len(every)
    for name in NAMES:
        heights = [getattr(columns, name) for columns in every.values()]
        axis.bar(places, heights, 0.7, below, color=COLOURS[name], label=TITLES.get(name, name))
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    hidden = [columns.hidden for columns in every.values()]
    beside, look = [place + 0.42 for place in places], {"edgecolor": COLOURS["exposed"], "hatch": "////"}
    axis.bar(beside, hidden, 0.12, color="white", linewidth=[bool(each) for each in hidden], **look, label=HIDDEN)
    axis.set_title(title, loc="left", fontsize=10)
    step = -(-len(every) // TICKS)
    short = [name if len(every) <= TICKS else name.rpartition(" ")[2] for name in every]
    turned = len(every) <= TICKS and max(map(len, every), default=0) > 8
    axis.set_xticks(list(places)[::step], short[::step], rotation=30 * turned, ha="right" if turned else "center")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylim(bottom=0, auto=True)
