"""A profile as text: one table of steps and blocks, rates, waits between ranks, and the kernels that lose most."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from seqpar.profiling.ranks import NAMES, Columns
from seqpar.profiling.result import Profile, by_class
from seqpar.profiling.trace import OUTSIDE

TITLES = ("wall", "products", "attention", "elementwise", "hidden", *NAMES[3:])
COUNT = 3  # losses that are shown
GAPS = "no kernel"


@dataclass(frozen=True)
class Loss:
    """The ms per step that a kernel loses on a rank. column: the kernel's column, or "exchange"."""

    kernel: str
    column: str
    rank: int
    ms: float


def losses(profile: Profile, count: int = COUNT) -> list[Loss]:
    """The kernels that lose most time, each on the rank where it loses most.

    Products and attention lose their time beyond the machine's best rate, exchanges the part that nothing hides, and
    other kernels their whole time. Gaps count as one kernel.
    """
    least = {rate.column: rate.least_ms for rate in profile.rates if rate.column in ("products", "attention")}
    found = list[Loss]()
    for rank in profile.ranks:
        total = profile.mean(rank)
        visible, moving = total.exposed + total.waiting, total.exposed + total.waiting + total.hidden
        lost = {"exchange": visible / moving if moving else 0.0, "elementwise": 1.0}
        for column in ("products", "attention"):
            spent = getattr(total, column)
            lost[column] = max(0.0, 1 - least.get(column, spent) / spent) if spent else 0.0
        found += [
            Loss(kernel.name, kernel.kind, rank, kernel.ms * lost[kernel.kind])
            for kernel in profile.kernels
            if kernel.rank == rank
        ]
        found.append(Loss(GAPS, "gaps", rank, total.gaps))
    found.sort(key=lambda loss: -loss.ms)
    largest = {(loss.kernel, loss.column): loss for loss in reversed(found) if loss.ms > 0}
    return sorted(largest.values(), key=lambda loss: -loss.ms)[:count]


def report(profile: Profile) -> str:
    lines = [f"{'rank':<5}{'step or blocks':<34}{'ms':>12}" + "".join(f"{title:>12}" for title in TITLES[1:])]
    for rank in profile.ranks:
        steps = {f"step {step + 1}": profile.step(rank, step) for step in profile.steps}
        kinds = {f"  {kind}": sum(blocks, Columns()) for kind, blocks in by_class(profile.blocks(rank)).items()}
        for name, columns in {**steps, "mean": profile.mean(rank), **kinds}.items():
            values = "".join(f"{getattr(columns, title):12.3f}" for title in TITLES)
            lines.append(f"{rank:<5}{name[:33]:<34}{values}")
    lines += ["hidden: exchanges while something computes; the other columns add up to the ms.", ""]
    lines += [*_rates(profile), *_waits(profile), "", "Kernels that lose the most time per step:"]
    for number, loss in enumerate(losses(profile), start=1):
        lines.append(f"{number}. {loss.ms:.3g} ms on rank {loss.rank}, {loss.column}: {loss.kernel}")
    notes = list(profile.notes)
    if len(profile.ranks) > 1:
        notes.append(f"the clocks of the ranks differ by at most {profile.clock_us:.0f} us")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _rates(profile: Profile) -> Iterator[str]:
    mean = profile.mean(0)  # rank 0 has the most tokens
    for rate in profile.rates:
        if (achieved := rate.achieved(mean)) is not None:
            amount = f"{rate.amount:.3g} {'GFLOP' if 'FLOP' in rate.unit else 'MB'} per step"
            share = f"{achieved / rate.ceiling:.0%}"
            yield f"{rate.column:<12}{achieved:8.3g} of {rate.ceiling:.3g} {rate.unit} ({share}; {amount})"
    if profile.rates:
        yield f"rates       {profile.source}"


def _waits(profile: Profile) -> Iterator[str]:
    for rank in profile.ranks:
        late = {other: ms for other, ms in profile.late[rank].items() if ms > 0 and other != rank}
        if late:
            waits = ", ".join(f"{ms:.3g} ms for rank {other}" for other, ms in sorted(late.items()))
            place, ms = _place({block: columns.waiting for block, columns in profile.blocks(rank).items()})
            yield f"waiting     rank {rank}: {waits} per step, most {place} ({ms:.3g} ms)"


def _place(blocks: Mapping[str, float]) -> tuple[str, float]:
    """The block with most of a time, or the class of blocks if no block has half of it."""
    largest = max(blocks, key=lambda block: blocks[block])
    if 2 * blocks[largest] < sum(blocks.values()):
        blocks = {kind: sum(values) for kind, values in by_class(blocks).items()}
        largest = max(blocks, key=lambda kind: blocks[kind])
    return "outside blocks" if largest == OUTSIDE else f"in {largest}", blocks[largest]


def facts(profile: Profile) -> dict[str, Any]:
    """A profile as plain values, without the single blocks and steps of `rows`."""
    return {
        "plan": None if profile.plan is None else str(profile.plan),
        "mean_ms": [{**asdict(profile.mean(rank)), "wall": profile.mean(rank).wall} for rank in profile.ranks],
        "late_ms": [{str(rank): ms for rank, ms in late.items()} for late in profile.late],
        "rates": [
            {**asdict(rate), "achieved": [rate.achieved(profile.mean(rank)) for rank in profile.ranks]}
            for rate in profile.rates
        ],
        "losses": [asdict(loss) for loss in losses(profile)],
        "clock_us": profile.clock_us,
        "notes": profile.notes,
        "graph": profile.graph,
    }


def rows(profile: Profile) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rank", "step", "block", *TITLES])
    for row in profile.rows:
        values = (f"{getattr(row.columns, title):.6f}" for title in TITLES)
        table.writerow([row.rank, row.step + 1, row.block, *values])
    return text.getvalue()
