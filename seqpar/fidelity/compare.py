"""Measures how far tensors of a run are from those of a reference run, and judges the errors by bounds.

It knows nothing about models, ranks or files: a comparison is a set of measured `Error`s, each at a `Place` of the run,
and `first_over` returns the first one that is over its `Bound`. Comparing predictions step by step and tensors block by
block differs only in the places.
When it wins: one definition of error and bound for every check of a run, so that numbers can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 1.25  # an error may be this many times the error of one rank in the same data type
# rounding makes the error of a single place scatter (0.74 to 1.35 times that of an equally precise run were seen), and
# the largest difference of a single element even more (up to 3.5 times)
PLACE_FACTOR, LARGEST_FACTOR = 1.6, 4.0
# errors up to this are rounding: in fp32 and fp64 the order of a sum decides how large they are
FLOORS = {torch.float64: 1e-11, torch.float32: 1e-5}
WIDER = {torch.float32: torch.float64, torch.float64: torch.float64}  # the reference of other data types is fp32


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
    """The error of tensors, relative to the root mean square (rms) of the reference.

    rms: the rms of the difference. largest: the largest absolute difference of an element, which shows a fault that few
    tokens have. Both are NaN if a value is not finite.
    """

    rms: float
    largest: float


@dataclass(frozen=True)
class Bound:
    """The largest `Error` that is accepted."""

    rms: float
    largest: float

    def share(self, error: Error) -> float:
        """Return the error's rms as a share of what is accepted: up to 1 is within the bound; NaN if it is NaN."""
        return error.rms / self.rms if self.rms else (0.0 if error.rms == 0 else math.inf)

    def why_not(self, error: Error) -> str | None:
        """Return in words why the error is too large for a single place even though errors scatter, or None."""
        if not self.share(error) <= PLACE_FACTOR:
            return f"error {error.rms:.2e}, expected at most {self.rms:.2e}"
        if not error.largest <= self.largest:
            return f"an element is wrong by {error.largest:.2e}, expected at most {self.largest:.2e}"
        return None


@dataclass(frozen=True)
class Finding:
    """The first place at which a bound is passed."""

    place: Place
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


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
    rms = math.sqrt(squares / count) / unit if math.isfinite(squares) else math.nan
    return Error(rms, largest / unit if math.isfinite(rms) else math.nan)


def worst(errors: Iterable[Error]) -> Error:
    """Return the largest of each number; NaN if one is NaN."""
    every = list(errors)
    return Error(_most([each.rms for each in every]), _most([each.largest for each in every]))


def bound(alone: Error, dtype: torch.dtype, factor: float = FACTOR) -> Bound:
    """Return what an error may be, given the error of one rank at the same place in the same data type."""
    floor = FLOORS.get(dtype, 0.0)
    largest = LARGEST_FACTOR * factor / FACTOR * alone.largest
    return Bound(max(factor * alone.rms, floor), max(largest, LARGEST_FACTOR * floor))


def first_over(errors: Mapping[Place, Error], bounds: Mapping[Place, Bound]) -> Finding | None:
    """Return the first place, in the order of the run, at which a bound is passed; None if all bounds hold.

    Bounds hold if the errors of all places together (the rms of their shares) are within them, and no place is over its
    own by more than errors scatter. Raises ValueError if a place has no bound or nothing is compared: what is not
    compared does not hold.
    """
    if not errors or errors.keys() != bounds.keys():
        raise ValueError(f"got errors at {len(errors)} places and bounds at {len(bounds)}, expected the same places")
    shares = {place: bounds[place].share(errors[place]) for place in sorted(errors)}
    for place in shares:
        reason = bounds[place].why_not(errors[place])
        if reason is not None:
            return Finding(place, reason)
    together = math.sqrt(sum(share**2 for share in shares.values()) / len(shares))
    if together <= 1:
        return None
    first = next(place for place, share in shares.items() if share > 1)
    reason = (
        f"error {errors[first].rms:.2e}, expected at most {bounds[first].rms:.2e}; {together:.2f} times over all steps"
    )
    return Finding(first, reason)


def first_unequal(bits: Sequence[str], reference: Sequence[str]) -> int | None:
    """Return the first index at which two lists of `digest`s differ, or None; the longer list differs at its end."""
    if list(bits) == list(reference):
        return None
    pairs = enumerate(zip(bits, reference, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(bits), len(reference)))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hex digits of a hash over names and all bits of tensors."""
    hashed = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        hashed.update(name.encode())
        whole = x.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)  # one number may have stride 0
        hashed.update(whole.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def _most(numbers: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
