"""Search for the best layout: predict and rank every data x cfg x ring x ulysses and strategy that the caller allows.

The aim "latency" puts all ranks on every image, so that the first image is ready soonest; "throughput" may also give
ranks separate images, for the most images per second. Names and sizes from the caller restrict the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from seqpar.mesh.mesh import fill
from seqpar.planner.costs import exact_strategies, facts_of, strategies, why_not
from seqpar.planner.predict import Load, Prediction, predict, totals
from seqpar.planner.rates import GIB, Rates
from seqpar.types.facts import Layout, Work

TIE = 0.01  # predictions that differ by a smaller share tie; the first in the order of `allowed` is taken then

Aim = Literal["latency", "throughput"]


@dataclass(frozen=True)
class Preferences:
    """The caller's requirements: an aim, sizes of some axes, whether to be exact, and names or "auto"."""

    aim: Aim = "latency"
    axes: Mapping[str, int] = field(default_factory=dict)
    strategy: str = "auto"
    exact: bool = False
    local: str = "auto"
    transport: str = "auto"


@dataclass(frozen=True)
class Ranking:
    """The result of a search: the layouts that fit the memory, best first, and the others with the reason for each."""

    work: Work
    preferences: Preferences
    load: Load
    rates: Rates
    ranked: tuple[Prediction, ...]
    too_big: tuple[tuple[Prediction, str], ...]

    @property
    def best(self) -> Layout:
        """The chosen layout; `ValueError` if no layout fits the memory."""
        if not self.ranked:
            name, reason = self._smallest
            raise ValueError(
                f"the run does not fit: its smallest layout ({name}) {reason}; start more processes, or use a smaller "
                f"--size, fewer classes or another --dtype"
            )
        return self.ranked[0].layout

    @property
    def _smallest(self) -> tuple[str, str]:
        # of the layouts that do not fit, and why it does not
        row, reason = min(self.too_big, key=lambda pair: pair[0].memory.total)
        return name_of(row.layout), reason

    def __str__(self) -> str:
        if not self.ranked:
            name, reason = self._smallest
            return f"nothing fits: {name} {reason}; rates: {self.rates.source}"
        first, *others = self.ranked
        aim = "lowest latency" if self.preferences.aim == "latency" else "highest throughput"
        text = f"{name_of(first.layout)}, {_ms(first)} predicted"
        if others:
            text += f" ({aim}); next {name_of(others[0].layout)}, {_ms(others[0])}"
            exact, other = (facts_of(row.layout.strategy).moves_only for row in (first, others[0]))
            rounds = exact and not other and others[0].ms < first.ms
            text += " (not chosen automatically: it rounds differently from one rank)" if rounds else ""
        else:
            text += " (nothing else to choose)"
        return f"{text}; rates: {self.rates.source}"

    def table(self) -> str:
        """A table with a row for each layout: ms per step and its parts, outputs per second, memory of a rank."""
        head = f"{'layout':<34} {'strategy':<10} {'ms per step':>11} {'gemm':>9} {'attention':>9} {'elementw.':>9}"
        lines = [f"{head} {'exchange':>9} {'per second':>10} {'GiB/rank':>10}"]
        for row in self.ranked:
            parts = " ".join(f"{ms:9.2f}" for ms in (row.gemm, row.attention, row.elementwise, row.exchange))
            speed = f"{1e3 * self.load.images / (row.ms * self.load.steps):10.3f}"
            lines.append(f"{_columns(row)} {row.ms:11.2f} {parts} {speed} {row.memory.total / GIB:10.1f}")
        lines += [f"{_columns(row)} does not fit: {reason}" for row, reason in self.too_big]
        return "\n".join([*lines, *([self.counts()] if self.ranked else [])])

    def counts(self) -> str:
        layout, load = self.best, self.load
        cost = totals(self.work, load, layout)
        moved = digits(cost.elements * load.itemsize / 1e9)
        text = f"a step: {digits(cost.flops / 1e12)} TFLOP, {moved} GB read and written"
        if layout.sequence > 1:
            text += (
                f"; the busiest rank sends {digits(cost.sent / 1e6)} MB in {cost.messages} messages ({name_of(layout)})"
            )
        return text


def search(
    work: Work, load: Load, world: int, preferences: Preferences, rates: Rates, transport: str, memory: float | None
) -> Ranking:
    """The ranking of all layouts of `world` ranks with `memory` GiB each (None means no limit).

    Raises ValueError if no layout satisfies the preferences.
    """
    layouts = allowed(world, preferences, work, load, transport)
    if not layouts:
        raise ValueError(_why_none(world, preferences, load, work))
    rows = [predict(work, load, layout, rates) for layout in layouts]
    too_big = tuple((row, reason) for row in rows if (reason := row.too_big(memory)) is not None)
    fitting = [row for row in rows if row.too_big(memory) is None]
    return Ranking(work, preferences, load, rates, _ranked(fitting), too_big)


def _ranked(fitting: list[Prediction]) -> tuple[Prediction, ...]:
    if not fitting:
        return ()
    # a strategy that rounds differently from one rank is chosen automatically only if no other layout fits
    exact = [row for row in fitting if facts_of(row.layout.strategy).moves_only] or fitting
    least_ms = min(row.ms for row in exact)
    first = next(row for row in exact if row.ms <= (1 + TIE) * least_ms)
    rest = sorted((row for row in fitting if row is not first), key=lambda row: row.ms)
    return first, *rest


def allowed(world: int, preferences: Preferences, work: Work, load: Load, transport: str) -> list[Layout]:
    """Every layout of `world` ranks that the preferences allow and that has work for every rank.

    The order is the preference when predictions tie: first layouts that split images over ranks, then those that
    split guidance branches (one small exchange per step), then the order that the strategies' files state.
    """
    names = tuple(strategies()) if preferences.strategy == "auto" else (preferences.strategy,)
    layouts = [
        Layout(data, cfg, ring, ulysses, name, transport)
        for data, cfg, ring, ulysses in _axes(world, preferences, load)
        for name in names
        if _fits(name, ring, ulysses, preferences, work)
    ]
    if preferences.strategy != "auto" and preferences.aim == "latency":
        layouts = _on_the_sequence(layouts)
    return sorted(layouts, key=_preference)


def _axes(world: int, preferences: Preferences, load: Load) -> Iterator[tuple[int, int, int, int]]:
    free = dict(preferences.axes) if preferences.aim == "throughput" else {"data": 1, **preferences.axes}
    for data in _divisors(world, free.get("data")):
        for cfg in (2, 1) if load.guidance else (1,):
            if free.get("cfg", cfg) != cfg or world % (data * cfg) or data > load.images:
                continue
            rest = world // (data * cfg)
            for ring in _divisors(rest, free.get("ring")):
                if free.get("ulysses", rest // ring) == rest // ring and rest <= load.tokens:
                    yield data, cfg, ring, rest // ring


def _divisors(number: int, wanted: int | None) -> list[int]:
    return [size for size in range(number, 0, -1) if number % size == 0 and wanted in (None, size)]


def _fits(name: str, ring: int, ulysses: int, preferences: Preferences, work: Work) -> bool:
    """Whether a strategy can run on these axes and the preferences allow it there.

    In an automatic search each computation is listed under one strategy only (see `StrategyFacts.names`).
    """
    facts = facts_of(name)
    if preferences.exact and ring * ulysses > 1 and not facts.moves_only:
        return False
    if facts.why_not(ring, ulysses, work.heads, work.kv_heads) is not None:
        return False
    if preferences.strategy != "auto":
        # a ring axis changes nothing for a strategy that uses both axes as one, but the caller may have set it
        return ring == 1 or bool(facts.axes) or "ring" in preferences.axes
    if not facts.names(ring, ulysses):
        return False
    # setting the ulysses axis asks for heads to be split over it, as long as there are enough of them
    means_heads = "ulysses" in preferences.axes and 1 < ulysses <= work.kv_heads
    return not means_heads or "ulysses" in facts.axes


def _on_the_sequence(layouts: list[Layout]) -> list[Layout]:
    most = max((layout.sequence for layout in layouts), default=1)
    longest = [layout for layout in layouts if layout.sequence == most]
    both = [x for x in longest if len(facts_of(x.strategy).axes) > 1 and x.ring > 1 and x.ulysses > 1]
    return both or [layout for layout in longest if layout.ring == 1] or longest


def _preference(layout: Layout) -> tuple[int, int, int, int]:
    return -layout.data, -layout.cfg, facts_of(layout.strategy).order, layout.ring


def _why_none(world: int, preferences: Preferences, load: Load, work: Work) -> str:
    axes = preferences.axes
    try:
        _, _, ring, ulysses = fill(
            world, axes.get("data", 1), axes.get("cfg"), axes.get("ring", 1), axes.get("ulysses"), load.guidance
        )
    except ValueError as error:
        return str(error)
    if load.tokens < ring * ulysses:
        ranks = ring * ulysses
        return f"{load.tokens} tokens cannot be sharded over {ranks} ranks (at least one per rank); use a larger --size"
    named = " ".join(f"{name}={size}" for name, size in axes.items()) or "no axes named"
    exact = exact_strategies()
    if preferences.exact and (preferences.strategy not in exact if preferences.strategy != "auto" else ring > 1):
        return (
            f"got strategy {preferences.strategy} with {named} in exact mode, expected {' or '.join(exact)} and no "
            f"ring axis: others merge partial results and round differently from one rank"
        )
    if preferences.strategy != "auto":
        reason = why_not(preferences.strategy, axes.get("ring", 1), axes.get("ulysses", 1), work.heads, work.kv_heads)
        if reason is not None:
            return reason
    return (
        f"got strategy {preferences.strategy} with {named} (ranks: {world}, images: {load.images}, "
        f"tokens: {load.tokens}), expected a mesh that has all ranks and that the strategy can use; name fewer axes"
    )


def name_of(layout: Layout) -> str:
    """A layout with its strategy, if it shards tokens."""
    return f"{layout} by {layout.strategy}" if layout.sequence > 1 else str(layout)


def _ms(row: Prediction) -> str:
    return f"{digits(row.ms)} ms per step"


def digits(value: float) -> str:
    """Return a number with three digits, or all before the point: 5050, not 5.05e+03."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def _columns(row: Prediction) -> str:
    return f"{row.layout!s:<34} {row.layout.strategy if row.layout.sequence > 1 else '-':<10}"
