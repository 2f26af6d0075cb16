"""Errors of a run's tensors against a reference run, and the bounds that they must keep.

This is the only definition of error and bound. It knows nothing about models, ranks or files: a `Comparison` holds the
`Error` of the ranks and of one rank alone at each `Place` of the run; its first finding is where the run is wrong.
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


@dataclass(frozen=True)
class TokenShare:
    """A rank's rows and tokens of full tensors.

    lengths: tokens of each stream on all ranks together; blocks may join some of them in any order. parts, rank: the
    number of ranks and this one's. rows: this rank's rows of the batch of `batch` rows, None for all.
    """

    lengths: Mapping[str, int]
    parts: int
    rank: int
    rows: Tensor | None = None
    batch: int = 0

    def nearest(self, whole: Tensor, local: Tensor) -> Callable[[Tensor], Tensor]:
        """The selection of this rank's share of a full tensor that is most like `local`; ValueError without one.

        Several orders of streams may have the same shape; the right one is nearest, and a fault is far from all.
        """
        takes = self.takes(whole, local)
        if len(takes) == 1:
            return takes[0]
        return min(takes, key=lambda take: float((take(whole).double() - local.double()).square().sum().nan_to_num()))

    def takes(self, whole: Tensor, local: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """All selections of a tensor of the shape of `local` from a full one; ValueError if there is none."""

        def rows(x: Tensor) -> Tensor:
            return x if self.rows is None or not x.dim() or len(x) != self.batch else x[self.rows.to(x.device)]

        taken = rows(whole)
        if taken.shape == local.shape:
            return [rows]
        dims = [d for d in range(taken.dim()) if taken.dim() == local.dim() and taken.shape[d] != local.shape[d]]
        indices = self._indices(taken.shape[dims[0]], local.shape[dims[0]]) if len(dims) == 1 else []
        if not indices:
            raise ValueError(
                f"got a block's output of shape {tuple(local.shape)} on one of {self.parts} ranks and "
                f"{tuple(whole.shape)} on one rank, expected a share of the tokens of {dict(self.lengths)}"
            )
        return [lambda x, index=index: rows(x).index_select(dims[0], index.to(x.device)) for index in indices]

    def _indices(self, total: int, count: int) -> list[Tensor]:
        chosen = [streams for n in range(len(self.lengths)) for streams in permutations(self.lengths.values(), n + 1)]
        indices = {self._joined(lengths) for lengths in chosen if sum(lengths) == total}
        return [torch.tensor(index, dtype=torch.int64) for index in sorted(indices) if len(index) == count]

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
    """Call `seen(name, tensor)` for every tensor that a block returns, in order."""
    counts = Counter[str]()

    def after(name: str, output: object) -> None:
        counts[name] += 1
        again = "" if counts[name] == 1 else f", call {counts[name]}"
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        for number, x in enumerate(tensors, start=1):
            seen(f"{name}{again}" if len(tensors) == 1 else f"{name}{again}, output {number}", x)

    blocks = [block for module in modules for block in blocks_of(module)]
    with hooked(blocks, after):
        yield


@contextmanager
def hooked(modules: Iterable[tuple[str, nn.Module]], work: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `work(name, output)` after each call of a module; its result, if any, replaces the output."""
    with ExitStack() as hooks:
        for name, module in modules:
            hooks.enter_context(module.register_forward_hook(lambda *call, name=name: work(name, call[-1])))
        yield


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model with their names: members of its lists, and its other layers of their types.

    A block without a forward method, whose parts the model calls, counts as its parts.
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
# equally precise runs scatter: errors of a single place by 0.74 to 1.35, its largest element by up to 3.5
PLACE_FACTOR, LARGEST_FACTOR = 1.6, 4.0
# errors up to this are rounding: in fp32 and fp64 the order of a sum decides
FLOORS = {torch.float64: 1e-11, torch.float32: 1e-5}
WIDER = {torch.float32: torch.float64, torch.float64: torch.float64}  # the reference of other data types is fp32
BITS = "other bits than {}, expected the same"
OTHER_WEIGHTS = "rank {} has other weights than rank 0: {}"
NOT_FINITE = "one rank alone has numbers that are not finite there; try another data type"


BLOCKS, RESULT, AFTER = 0, 1, 2  # parts of an evaluation of the model, in order


@dataclass(frozen=True, order=True)
class Place:
    """Where tensors were taken, in the order of the run.

    step, call: the step, and the call of the model within it, from 0. part: `BLOCKS`, `RESULT`, or `AFTER` for the
    state after the step. index: within the part; for output n of the blocks 3 n + 2, for the attention before it
    3 n + 1, and for copied tensors before that 3 n. name: for people.
    """

    step: int
    call: int = 0
    part: int = BLOCKS
    index: int = 0
    name: str = "prediction"

    def __str__(self) -> str:
        return f"{self.name}{f', call {self.call + 1},' if self.call else ''} of step {self.step + 1}"


@dataclass(frozen=True)
class Error:
    """The error of tensors, or the largest accepted one, relative to the root mean square (rms) of the reference.

    rms: the rms of the difference. largest: the largest absolute difference of an element, which shows faults of few
    tokens. Both are NaN if a value is not finite.
    """

    rms: float
    largest: float

    def share(self, bound: Error) -> float:
        """The rms divided by the accepted one: up to 1 is within the bound."""
        return self.rms / bound.rms if bound.rms else (0.0 if self.rms == 0 else math.inf)

    def why_not(self, bound: Error) -> str | None:
        """Why the error is too large for a single place, although errors scatter; or None."""
        if not self.share(bound) <= PLACE_FACTOR:
            return f"error {self.rms:.2e}, expected at most {bound.rms:.2e}"
        if not self.largest <= bound.largest:
            return f"an element is wrong by {self.largest:.2e}, expected at most {bound.largest:.2e}"
        return None


EXACT = Error(0.0, 0.0)
Bits = Mapping[Place, str]
"""Digests of tensors that all ranks should have."""


@dataclass(frozen=True)
class Finding:
    """Something wrong at a place.

    ratio: an error in units of one rank's, else 0. by: the rank that computed it; None for the rank that found it.
    """

    place: Place
    reason: str
    ratio: float = 0.0
    by: int | None = None


@dataclass
class Comparison:
    """The measurements of one rank: errors of the ranks' run, and of one rank alone in the same data type.

    findings: faults besides errors. bits: digests of tensors that all ranks should have. blocks: the largest number of
    block outputs in an evaluation. by: the rank that computed the worst part of a full tensor. other: a rank that
    computes other numbers than rank 0 also alone, whose data makes blocks of all ranks wrong.
    """

    dtype: torch.dtype
    errors: dict[Place, tuple[Error, Error]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    bits: dict[Place, str] = field(default_factory=dict)
    blocks: int = 0
    by: dict[Place, int] = field(default_factory=dict)
    other: int | None = None

    def add(self, place: Place, ranks: Error, alone: Error) -> None:
        """Add the errors at a place; one rank alone must have finite numbers there."""
        self.errors[place] = ranks, alone
        if math.isnan(alone.rms):
            self.find(place, NOT_FINITE)

    def find(self, place: Place, reason: str, ratio: float = 0.0, by: int | None = None) -> None:
        self.findings.append(Finding(place, reason, ratio, by))

    def ratio(self, place: Place) -> float:
        """The error at a place in units of one rank's, or of the smallest that counts."""
        ranks, alone = self.errors[place]
        return FACTOR * ranks.share(bound(alone, self.dtype))

    def first(self) -> Finding | None:
        """The first fault, or None; ValueError if nothing was compared.

        Bounds hold if the rms of the ratios of all places is within them, and no place exceeds its own by more than
        errors scatter.
        """
        if not self.errors:
            raise ValueError("nothing was compared")
        findings, ratios = list(self.findings), {place: self.ratio(place) for place in self.errors}
        together = math.sqrt(sum(ratio**2 for ratio in ratios.values()) / len(ratios)) / FACTOR
        for place, (ranks, alone) in self.errors.items():
            accepted = bound(alone, self.dtype)
            reason, by = ranks.why_not(accepted), self.by.get(place)
            if reason is None and together > 1 and ratios[place] > FACTOR:
                expected = f"expected at most {accepted.rms:.2e}"
                reason = f"error {ranks.rms:.2e}, {expected}; {together:.2f} times over all steps"
            if reason is not None and self.other is not None:
                reason, by = f"{reason}; rank {self.other} computes other numbers than rank 0 also alone", self.other
            if reason is not None:
                findings.append(Finding(place, reason, ratios[place], by))
        return min(findings, key=lambda finding: finding.place, default=None)


def error(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Error:
    """The error of named tensors as one; ValueError if names or shapes differ. Sums are in fp64."""
    if {name: x.shape for name, x in got.items()} != {name: x.shape for name, x in reference.items()}:
        shown = [{name: tuple(x.shape) for name, x in tensors.items()} for tensors in (got, reference)]
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
    """The accepted error, given the error of one rank at the same place in the same data type."""
    floor = FLOORS.get(dtype, 0.0)
    return Error(max(FACTOR * alone.rms, floor), LARGEST_FACTOR * max(alone.largest, floor))


def first_unequal(bits: Bits, reference: Bits) -> Place | None:
    """The first place at which digests differ, or that only one of both has; or None."""
    places = bits.keys() | reference.keys()
    return min((place for place in places if bits.get(place) != reference.get(place)), default=None)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bytes_of(x), bytes_of(y).to(x.device))


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor, of any strides."""
    flat = x.detach().flatten()
    if flat.stride(0) != 1:  # of one number it may be 0
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits of a hash over names and all bits of tensors."""
    hashed = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(bytes_of(x.cpu()).numpy().tobytes())
    return hashed.hexdigest()[:16]
