"""Measures how far tensors of a run are from those of a reference run, and judges the errors by bounds.

It is the one definition of error and bound. It knows nothing about models, ranks or files: a `Comparison` holds
`Error`s, each at a `Place` of the run, beside those of one rank alone, and its first finding is where the run is wrong.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Take = Callable[[Tensor], Tensor]
"""Takes this rank's rows and tokens of a whole tensor."""


@dataclass(frozen=True)
class TokenShare:
    """What one rank has of the tensors of a whole run.

    lengths: tokens of each stream on all ranks together; blocks may join some of them in any order. parts, rank: how
    many ranks share them, and which one this is. rows: this rank's rows of the batch of `batch` rows, None for all.
    """

    lengths: Mapping[str, int]
    parts: int
    rank: int
    rows: Tensor | None = None
    batch: int = 0

    def nearest(self, whole: Tensor, mine: Tensor) -> Take:
        """Return the way to take this rank's share of a whole tensor that is most like `mine`; ValueError without one.

        A fault is far from every way; where several orders of streams have the same shape, the right one is nearest.
        """
        takes = self.takes(whole, mine)
        if len(takes) == 1:
            return takes[0]
        return min(takes, key=lambda take: float((take(whole).double() - mine.double()).square().sum().nan_to_num()))

    def takes(self, whole: Tensor, mine: Tensor) -> list[Take]:
        """Return every way to take a tensor of the shape of `mine` from a whole one; ValueError if there is none."""
        taken = self._rows(whole)
        if taken.shape == mine.shape:
            return [self._rows]
        dims = [dim for dim in range(taken.dim()) if taken.dim() == mine.dim() and taken.shape[dim] != mine.shape[dim]]
        chosen = self._indices(taken.shape[dims[0]], mine.shape[dims[0]]) if len(dims) == 1 else []
        if not chosen:
            raise ValueError(
                f"got a block's output of shape {tuple(mine.shape)} on one of {self.parts} ranks and "
                f"{tuple(whole.shape)} on one rank, expected a share of the tokens of {dict(self.lengths)}"
            )
        return [lambda x, index=index: self._rows(x).index_select(dims[0], index.to(x.device)) for index in chosen]

    def _rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        if self.rows is None or not whole.dim() or len(whole) != self.batch:
            return whole
        return whole[self.rows.to(whole.device)]

    def _indices(self, total: int, mine: int) -> list[Tensor]:
        """Return the numbers of this rank's tokens, for each choice of streams with so many tokens in all."""
        chosen = [each for n in range(len(self.lengths)) for each in permutations(self.lengths.values(), n + 1)]
        indices = {self._joined(lengths) for lengths in chosen if sum(lengths) == total}
        return [torch.tensor(index, dtype=torch.int64) for index in sorted(indices) if len(index) == mine]

    def _joined(self, lengths: Iterable[int]) -> tuple[int, ...]:
        index, start = list[int](), 0
        for length in lengths:
            # larger shares come first; counted here and not by `Shard`, whose fault a comparison would share
            share, rest = divmod(length, self.parts)
            first = start + self.rank * share + min(self.rank, rest)
            index += range(first, first + share + (self.rank < rest))
            start += length
        return tuple(index)


@contextmanager
def watched(modules: Iterable[nn.Module], seen: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Call `seen(name, tensor)` for every tensor that a block returns, in their order."""
    counts = Counter[str]()

    def after(name: str, output: object) -> None:
        counts[name] += 1
        again = "" if counts[name] == 1 else f", call {counts[name]}"
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        for number, x in enumerate(tensors, start=1):
            seen(f"{name}{again}" if len(tensors) == 1 else f"{name}{again}, output {number}", x)

    blocks = [each for module in modules for each in blocks_of(module)]
    with hooked(blocks, after):
        yield


@contextmanager
def hooked(modules: Iterable[tuple[str, nn.Module]], work: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `work(name, output)` after each call of a module; what it returns, if anything, replaces the output."""
    with ExitStack() as hooks:
        for name, module in modules:
            hooks.enter_context(module.register_forward_hook(lambda *call, name=name: work(name, call[-1])))
        yield


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their names: members of its lists, and its other layers of their types.

    A block without a forward of its own, whose parts the model calls, counts as these parts.
    """
    children = list(module.named_children())
    lists = [(name, child) for name, child in children if isinstance(child, nn.ModuleList)]
    members = [(f"{name}.{i}", member) for name, child in lists for i, member in enumerate(child)]
    kinds = {type(member) for _, member in members if any(True for _ in member.children())}
    members += [(name, child) for name, child in children if type(child) in kinds]
    return [called for name, member in members for called in _called(name, member)]


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for part, child in module.named_children():
        yield from _called(f"{name}.{part}", child)


FACTOR = 1.25  # an error may be this many times the error of one rank in the same data type
# rounding makes the error of a single place scatter (0.74 to 1.35 times that of an equally precise run were seen), and
# the largest difference of a single element even more (up to 3.5 times)
PLACE_FACTOR, LARGEST_FACTOR = 1.6, 4.0
# errors up to this are rounding: in fp32 and fp64 the order of a sum decides how large they are
FLOORS = {torch.float64: 1e-11, torch.float32: 1e-5}
WIDER = {torch.float32: torch.float64, torch.float64: torch.float64}  # the reference of other data types is fp32
BITS = "other bits than {}, expected the same"
OTHER_WEIGHTS = "rank {} has other weights than rank 0: {}"
NOT_FINITE = "one rank alone has numbers that are not finite there; try another data type"


@dataclass(frozen=True, order=True)
class Place:
    """Where tensors were taken: evaluation of the model (from 0), position within it, and a name for people."""

    step: int
    position: int = 0
    name: str = "prediction"

    def __str__(self) -> str:
        return f"{self.name} of step {self.step + 1}"


@dataclass(frozen=True)
class Error:
    """The error of tensors, or the largest that is accepted, relative to the root mean square (rms) of the reference.

    rms: the rms of the difference. largest: the largest absolute difference of an element, which shows a fault that few
    tokens have. Both are NaN if a value is not finite.
    """

    rms: float
    largest: float

    def share(self, bound: Error) -> float:
        """Return the rms as a share of what is accepted: up to 1 is within the bound; NaN if it is NaN."""
        return self.rms / bound.rms if bound.rms else (0.0 if self.rms == 0 else math.inf)

    def why_not(self, bound: Error) -> str | None:
        """Return in words why the error is too large for a single place even though errors scatter, or None."""
        if not self.share(bound) <= PLACE_FACTOR:
            return f"error {self.rms:.2e}, expected at most {bound.rms:.2e}"
        if not self.largest <= bound.largest:
            return f"an element is wrong by {self.largest:.2e}, expected at most {bound.largest:.2e}"
        return None


EXACT = Error(0.0, 0.0)
Bits = Mapping[Place, str]
"""Digests of what all ranks should have whole."""


@dataclass(frozen=True)
class Finding:
    """A place at which something is wrong, and what.

    ratio: of an error, in units of that of one rank; else 0. by: the rank that computed it; None for the rank that
    found it.
    """

    place: Place
    reason: str
    ratio: float = 0.0
    by: int | None = None


@dataclass
class Comparison:
    """What one rank has measured: errors of the ranks' run, and of one rank alone in the same data type.

    findings: what is wrong besides errors. bits: digests of what all ranks should have whole. blocks: the largest
    number of blocks' outputs in an evaluation. by: the ranks that computed what is most wrong in whole tensors. other:
    a rank that computes other numbers than rank 0 also alone; what it sends makes blocks of all ranks wrong.
    """

    dtype: torch.dtype
    errors: dict[Place, tuple[Error, Error]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    bits: dict[Place, str] = field(default_factory=dict)
    blocks: int = 0
    by: dict[Place, int] = field(default_factory=dict)
    other: int | None = None

    def add(self, place: Place, mine: Error, alone: Error) -> None:
        """Add the errors at a place; one rank alone must have finite numbers there."""
        self.errors[place] = mine, alone
        if math.isnan(alone.rms):
            self.find(place, NOT_FINITE)

    def find(self, place: Place, reason: str, ratio: float = 0.0, by: int | None = None) -> None:
        """Add what is wrong at a place; see `Finding`."""
        self.findings.append(Finding(place, reason, ratio, by))

    def ratio(self, place: Place) -> float:
        """Return the error at a place in units of one rank's, or of the smallest that counts."""
        mine, alone = self.errors[place]
        return FACTOR * mine.share(bound(alone, self.dtype))

    def first(self) -> Finding | None:
        """Return the first place at which something is wrong, or None; ValueError if nothing was compared.

        Bounds hold if the errors of all places together (the rms of their ratios) are within them, and no place is over
        its own by more than errors scatter.
        """
        if not self.errors:
            raise ValueError("got no errors, expected some: what is not compared does not hold")
        over, ratios = list[Finding](), {place: self.ratio(place) for place in self.errors}
        together = math.sqrt(sum(ratio**2 for ratio in ratios.values()) / len(ratios)) / FACTOR
        for place, (mine, alone) in self.errors.items():
            accepted = bound(alone, self.dtype)
            if (reason := mine.why_not(accepted)) is not None:
                over.append(self._over(place, reason))
            elif together > 1 and ratios[place] > FACTOR:
                reason = (
                    f"error {mine.rms:.2e}, expected at most {accepted.rms:.2e}; {together:.2f} times over all steps"
                )
                over.append(self._over(place, reason))
        return min([*self.findings, *over], key=lambda each: each.place, default=None)

    def _over(self, place: Place, reason: str) -> Finding:
        """Return an error that is over its bound, as a finding."""
        if self.other is None:
            return Finding(place, reason, self.ratio(place), self.by.get(place))
        reason += f"; rank {self.other} computes other numbers than rank 0 also alone"
        return Finding(place, reason, self.ratio(place), self.other)


def error(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Error:
    """Return the error of named tensors as one; ValueError if names or shapes differ. Sums are in fp64."""
    if {name: x.shape for name, x in got.items()} != {name: x.shape for name, x in reference.items()}:
        shown = [{name: tuple(x.shape) for name, x in each.items()} for each in (got, reference)]
        raise ValueError(f"got tensors {shown[0]} to compare with {shown[1]}, expected the same names and shapes")
    squares = total = largest = 0.0
    count = sum(x.numel() for x in reference.values())
    for name, truth in reference.items():
        wide = truth.double()
        difference = got[name].to(wide.device, torch.float64) - wide
        squares += float(difference.square().sum())
        total += float(wide.square().sum())
        # a maximum with NaN would depend on the order, so NaN comes from the sum
        largest = max(largest, float(difference.abs().max())) if difference.numel() else largest
    unit = math.sqrt(total / count) if total else 1.0
    rms = math.sqrt(squares / max(1, count)) / unit if math.isfinite(squares) else math.nan
    return Error(rms, largest / unit if math.isfinite(rms) else math.nan)


def bound(alone: Error, dtype: torch.dtype) -> Error:
    """Return what an error may be, given the error of one rank at the same place in the same data type."""
    floor = FLOORS.get(dtype, 0.0)
    return Error(max(FACTOR * alone.rms, floor), LARGEST_FACTOR * max(alone.largest, floor))


def first_unequal(bits: Bits, reference: Bits) -> Place | None:
    """Return the first place at which digests differ, or that only one of both has; None if there is none."""
    places = bits.keys() | reference.keys()
    return min((place for place in places if bits.get(place) != reference.get(place)), default=None)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape, data type and bits."""
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bytes_of(x), bytes_of(y).to(x.device))


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, of any strides."""
    flat = x.detach().flatten()
    if flat.stride(0) != 1:  # of one number it may be 0
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hex digits of a hash over names and all bits of tensors."""
    hashed = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(bytes_of(x.cpu()).numpy().tobytes())
    return hashed.hexdigest()[:16]
