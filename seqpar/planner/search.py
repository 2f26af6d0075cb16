"""Which layout is best: every data x cfg x ring x ulysses and strategy that the caller allows, predicted and ranked.

Two aims: "latency" puts all ranks on every picture (the first one soonest); "throughput" may also give each rank its
own pictures (most pictures a second). Names and sizes that the caller gives restrict what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from seqpar.mesh import fill
from seqpar.planner.costs import Layout, Work
from seqpar.planner.predict import GIB, Load, Prediction, predict
from seqpar.planner.rates import Rates

ORDER = ("kv_gather", "ulysses", "kv_first", "usp", "ring")
EXACT = ORDER[:3]
"""They only move data: one rank's bits, of kv_first where a product rounds its columns alike however many it has, as on
H200s. Unasked, only these are taken."""
TIE = 0.01  # predictions that differ by less say nothing: then the first in the order of `allowed`

Aim = Literal["latency", "throughput"]


@dataclass(frozen=True)
class Wish:
    """What the caller says: an aim, sizes of some axes, a strategy (or "auto"), whether only exact ones will do."""

    aim: Aim = "latency"
    axes: Mapping[str, int] = field(default_factory=dict)
    strategy: str = "auto"
    exact: bool = False


@dataclass(frozen=True)
class Plan:
    """All layouts that were looked at, best first; those that do not fit the memory come last, each with its reason."""

    wish: Wish
    load: Load
    rates: Rates
    ranked: tuple[Prediction, ...]
    too_big: tuple[tuple[Prediction, str], ...]

    @property
    def best(self) -> Layout:
        """What is taken; `ValueError` where nothing fits the memory."""
        if not self.ranked:
            row, reason = min(self.too_big, key=lambda pair: pair[0].memory.total)
            raise ValueError(
                f"got a run that does not fit: its smallest layout ({_name(row.layout)}) {reason}, expected one that "
                f"does; start more processes, take a smaller --size, fewer classes or another --dtype"
            )
        return self.ranked[0].layout

    def __str__(self) -> str:
        """One line: what, what is expected, what came next, on what grounds."""
        if not self.ranked:
            return f"nothing fits; rates: {self.rates.source}"
        first, *others = self.ranked
        aim = "the first picture soonest" if self.wish.aim == "latency" else "most pictures a second"
        text = f"{_name(first.layout)}, {_ms(first)} predicted"
        if others:
            text += f" ({aim}); next {_name(others[0].layout)}, {_ms(others[0])}"
            exact, other = (row.layout.strategy in EXACT for row in (first, others[0]))
            rounds = exact and not other and others[0].ms < first.ms
            text += " (not taken unasked: it rounds otherwise than one rank)" if rounds else ""
        else:
            text += " (nothing else to choose)"
        if first.layout.strategy not in ORDER:
            text += f"; {first.layout.strategy} is counted as ulysses"
        return f"{text}; rates: {self.rates.source}"

    def table(self) -> str:
        """A row a layout: ms a step and its parts, pictures a second, memory of a rank."""
        head = f"{'layout':<34} {'strategy':<10} {'ms a step':>10} {'gemm':>9} {'attention':>9} {'elementw.':>9}"
        lines = [f"{head} {'exchange':>9} {'pictures/s':>10} {'GiB a rank':>10}"]
        for row in self.ranked:
            parts = " ".join(f"{ms:9.2f}" for ms in (row.gemm, row.attention, row.elementwise, row.exchange))
            speed = f"{1e3 * self.load.images / (row.ms * self.load.steps):10.3f}"
            lines.append(f"{_columns(row)} {row.ms:10.2f} {parts} {speed} {row.memory.total / GIB:10.1f}")
        lines += [f"{_columns(row)} does not fit: {reason}" for row, reason in self.too_big]
        return "\n".join(lines)


def plan(work: Work, load: Load, world: int, wish: Wish, rates: Rates, transport: str, memory: float | None) -> Plan:
    """The best layout of `world` ranks with `memory` GiB each (None: no limit), and all others.

    Raises ValueError where no layout is what was asked for.
    """
    layouts = allowed(world, wish, work, load, transport)
    if not layouts:
        raise ValueError(_why_none(world, wish, load))
    found = [predict(work, load, layout, rates) for layout in layouts]
    too_big = tuple((row, reason) for row in found if (reason := row.too_big(memory)) is not None)
    fitting = [row for row in found if row.too_big(memory) is None]
    return Plan(wish, load, rates, _ranked(fitting), too_big)


def _ranked(fitting: list[Prediction]) -> tuple[Prediction, ...]:
    """What is taken, then the others, fastest first."""
    if not fitting:
        return ()
    # rings round otherwise than one rank: unasked, only where nothing else fits
    exact = [row for row in fitting if row.layout.strategy in EXACT] or fitting
    least_ms = min(row.ms for row in exact)
    first = next(row for row in exact if row.ms <= (1 + TIE) * least_ms)
    rest = sorted((row for row in fitting if row is not first), key=lambda row: row.ms)
    return first, *rest


def allowed(world: int, wish: Wish, work: Work, load: Load, transport: str) -> list[Layout]:
    """Every layout of `world` ranks that the wish allows and the pictures can fill.

    In order of preference where predictions tie: pictures apart, guidance branches apart (one small exchange a step),
    then `ORDER` (the exact ones first; on two ranks of a sequence, where both move the same bytes, kv_gather was as
    fast as ulysses or up to 5 % faster, by either transport, wherever it was measured).
    """
    names = ORDER if wish.strategy == "auto" else (wish.strategy,)
    found = [
        Layout(data, cfg, ring, ulysses, name, transport)
        for data, cfg, ring, ulysses in _axes(world, wish, load)
        for name in names
        if _fits(name, ring, ulysses, wish, work)
    ]
    if wish.strategy != "auto" and wish.aim == "latency":
        found = _on_the_sequence(found)
    return sorted(found, key=_preference)


def _axes(world: int, wish: Wish, load: Load) -> Iterator[tuple[int, int, int, int]]:
    """All sizes whose product is `world`, with an image for each data rank and a token for each rank of a sequence."""
    free = dict(wish.axes) if wish.aim == "throughput" else {"data": 1, **wish.axes}
    for data in _divisors(world, free.get("data")):
        for cfg in (2, 1) if load.guidance else (1,):
            if free.get("cfg", cfg) != cfg or world % (data * cfg) or data > load.images:
                continue
            rest = world // (data * cfg)
            for ring in _divisors(rest, free.get("ring")):
                if free.get("ulysses", rest // ring) == rest // ring and rest <= load.tokens:
                    yield data, cfg, ring, rest // ring


def _divisors(number: int, given: int | None) -> list[int]:
    return [size for size in range(number, 0, -1) if number % size == 0 and given in (None, size)]


def _fits(name: str, ring: int, ulysses: int, wish: Wish, work: Work) -> bool:
    """Whether a strategy is meant for these axes; unnamed, each way of computing has one name."""
    if wish.exact and ring * ulysses > 1 and name not in EXACT:
        return False
    one_axis = {"ring": ulysses == 1, "ulysses": ring == 1}
    if wish.strategy != "auto":
        return one_axis.get(name, name == "usp" or ring == 1 or "ring" in wish.axes)
    if ring * ulysses == 1:
        return name == "ulysses"
    # who names the ulysses axis means ulysses, as long as there are heads for it
    means_ulysses = "ulysses" in wish.axes and ulysses <= work.kv_heads
    gathers = ring == 1 and not means_ulysses
    return {**one_axis, "usp": ring > 1 and ulysses > 1, "kv_gather": gathers, "kv_first": gathers}[name]


def _on_the_sequence(found: list[Layout]) -> list[Layout]:
    """A named strategy gets as many ranks as it can, so that it really exchanges: on both axes for usp, else on one."""
    most = max((layout.sequence for layout in found), default=1)
    found = [layout for layout in found if layout.sequence == most]
    both = [layout for layout in found if layout.strategy == "usp" and layout.ring > 1 and layout.ulysses > 1]
    return both or [layout for layout in found if layout.ring == 1] or found


def _preference(layout: Layout) -> tuple[int, int, int, int]:
    name = layout.strategy
    return -layout.data, -layout.cfg, ORDER.index(name) if name in ORDER else 0, layout.ring


def _why_none(world: int, wish: Wish, load: Load) -> str:
    """What cannot be, for people."""
    axes = wish.axes
    try:
        _, _, ring, ulysses = fill(
            world, axes.get("data", 1), axes.get("cfg"), axes.get("ring", 1), axes.get("ulysses"), load.guidance
        )
    except ValueError as error:
        return str(error)
    if load.tokens < ring * ulysses:
        return f"got {load.tokens} tokens for {ring * ulysses} ranks, expected one a rank; use a larger --size"
    named = " ".join(f"{name}={size}" for name, size in axes.items()) or "no axes named"
    if wish.exact and wish.strategy not in ("auto", *EXACT):
        return f"got strategy {wish.strategy} in exact mode, expected {' or '.join(EXACT)}: others round otherwise"
    for name, other in (("ulysses", "ring"), ("ring", "ulysses")):
        if wish.strategy == name and axes.get(other, 1) > 1:
            return f"got strategy {name} with {other}={axes[other]}, expected {other}=1; use strategy usp for both"
    return (
        f"got strategy {wish.strategy} with {named} for {world} process(es), {load.images} picture(s) and "
        f"{load.tokens} tokens, expected a mesh that has all ranks and that the strategy can use; name fewer axes"
    )


def _name(layout: Layout) -> str:
    return f"{layout} by {layout.strategy}" if layout.sequence > 1 else str(layout)


def _ms(row: Prediction) -> str:
    return f"{row.ms:.3g} ms a step"


def _columns(row: Prediction) -> str:
    return f"{row.layout!s:<34} {row.layout.strategy if row.layout.sequence > 1 else '-':<10}"
