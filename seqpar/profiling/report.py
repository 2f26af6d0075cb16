"""A profile as text: a table of steps and blocks, the rates beside the machine's, and the largest losses."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from seqpar.profiling.columns import Columns
from seqpar.profiling.losses import losses
from seqpar.profiling.result import Profile, by_class

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
