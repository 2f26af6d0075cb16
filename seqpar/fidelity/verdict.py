"""The result of a verification: errors of every rank at every block and step, and the first one that is too large.

An error may be 1.25 times that of one rank alone in the same data type, both measured by one rank in a wider type (over
all places together, and no place by more than errors scatter; see `compare.first_over`). It fails closed: what is not
compared does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqpar.fidelity.blocks import Compared
from seqpar.fidelity.compare import FACTOR, FLOORS, Error, Finding, Place, bound, error, first_over
from seqpar.inputs import broadcast
from seqpar.mesh import Mesh

WHOLE, AFTER = 10**6, 2 * 10**6  # positions of a step's prediction and of the state after it: they follow its blocks
EXACT = Error(0.0, 0.0)
BITS = "other bits than {}, expected the same"


def block_position(number: int) -> int:
    """Return the position of a block's output in its step; attentions before it have the even one before."""
    return 2 * number + 1


class VerificationError(FloatingPointError):
    """Raised if several ranks do not compute what one rank computes; the message names the first place."""


@dataclass
class Measured:
    """What one rank has measured: errors of the ranks' run, and of one rank alone in the same data type.

    found: what is wrong besides errors. bits: digests of what all ranks should have whole.
    """

    dtype: torch.dtype
    mine: dict[Place, Error] = field(default_factory=dict)
    alone: dict[Place, Error] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    blocks: int = 0

    def add(self, place: Place, mine: Error, alone: Error) -> None:
        """Add the errors at a place; one rank alone must have finite numbers there."""
        self.mine[place], self.alone[place] = mine, alone
        if math.isnan(alone.rms):
            self.find(place, "one rank alone has numbers that are not finite there; try another data type")

    def find(self, place: Place, reason: str) -> None:
        """Add what is wrong at a place."""
        self.found.append(Finding(place, reason))

    def compare_references(self, mesh: Mesh, place: Place, truth: Mapping[str, Tensor]) -> None:
        """Compare what this rank computes alone in the wider type with rank 0's; all ranks must call this together."""
        reason = bound(EXACT, torch.float32).why_not(error(truth, broadcast(mesh, truth)))
        if reason is not None:
            self.find(place, f"{reason}, between what this rank and what rank 0 compute alone")

    def add_blocks(self, step: int, compared: Compared) -> None:
        """Add the errors of all blocks of a step."""
        if (reason := compared.missing()) is not None:
            self.find(Place(step, 0, "a block"), reason)
        for number, (name, mine) in enumerate(compared.mine.items()):
            alone = compared.alone.get(name, Error(math.nan, math.nan))
            self.add(Place(step, block_position(number), name), mine, alone)
        self.blocks = max(self.blocks, len(compared.mine))

    def first(self) -> Finding | None:
        """Return the first place at which something is wrong; ValueError if no prediction was compared."""
        bounds = {place: bound(self.alone[place], self.dtype) for place in self.mine}
        over = first_over(self.mine, bounds)
        return min([*self.found, *([] if over is None else [over])], key=lambda each: each.place, default=None)

    def worst(self) -> tuple[float, Place]:
        """Return the largest error in units of one rank's, and its place."""
        ratios = {place: self.ratio(place) for place in self.mine}
        place = max(ratios, key=lambda each: (math.isnan(ratios[each]), ratios[each]))
        return ratios[place], place

    def ratio(self, place: Place) -> float:
        """Return the error at a place in units of one rank's, or of the smallest that counts; 0 for other findings."""
        if place not in self.mine:
            return 0.0
        mine, unit = self.mine[place].rms, max(self.alone[place].rms, FLOORS.get(self.dtype, 0.0) / FACTOR)
        return mine / unit if unit else (0.0 if mine == 0 else math.inf)


@dataclass(frozen=True)
class Verdict:
    """What was verified, and what it showed; `finding` is None if all ranks compute what one rank computes.

    what: ranks, layout and data type. steps, blocks: how many evaluations of the model, and outputs of blocks in each.
    ratio: the largest error in units of one rank's, at `where`. seconds: the time that the verification took. gib: the
    GPU memory at its peak, on the rank that used most; None on CPUs. notes: what was not compared, and why.
    """

    what: str
    steps: int
    blocks: int
    ratio: float
    where: str
    finding: str | None
    seconds: float
    gib: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = "" if self.gib is None else f", {self.gib:.1f} GiB at most"
        compared = f"{self.steps} evaluations of {self.blocks} block outputs"
        lines = [
            f"verify    {self.what}: {compared} ({self.seconds:.1f} s{memory})",
            f"verify    largest error {self.ratio:.2f} times that of one rank in the same data type, at {self.where}",
            *(f"verify    {note}" for note in self.notes),
            f"verify    {'every step holds' if self.finding is None else f'FAILS at {self.finding}'}",
        ]
        return "\n".join(lines)


def judged(
    mesh: Mesh, measured: Measured, what: str, cost: tuple[float, float | None], notes: Sequence[str]
) -> Verdict:
    """Return the verdict over all ranks, the same on each; every rank must call this at the same time.

    what, notes: see `Verdict`. cost: seconds, and the GiB of this rank.
    """
    first = measured.first()
    size = 0.0 if first is None else measured.ratio(first.place)
    kind = tuple[Finding | None, tuple[float, Place], list[str], float | None, float, int]
    every = mesh.collect((first, measured.worst(), measured.bits, cost[1], size, measured.blocks), kind)
    firsts = [(each[0], each[4], rank) for rank, each in enumerate(every) if each[0] is not None]
    blocks, finding = max(each[5] for each in every), None  # a rank without tokens of a stream has fewer than others
    if firsts:  # of several ranks, the one that is most wrong there
        found, _, rank = min(firsts, key=lambda each: (each[0].place, not math.isnan(each[1]), -each[1]))
        finding = f"{found.place} on rank {rank}: {found.reason}"
    elif different := next((rank for rank, each in enumerate(every) if each[2] != every[0][2]), None):
        finding = f"the end of the run: rank {different} has {BITS.format('rank 0')}"
    elif not blocks:
        finding = "the blocks: none was compared, because no hook of a block was called"
    ratio, place = max((each[1] for each in every), key=lambda each: (math.isnan(each[0]), each[0]))
    memory = max((each[3] for each in every if each[3] is not None), default=None)
    steps = len({place.step for place in measured.mine})
    return Verdict(what, steps, blocks, ratio, str(place), finding, cost[0], memory, tuple(notes))
