"""Key maps: which tensors of a checkpoint make the parameters of a model, and what the shapes of a checkpoint tell.

A model states its key maps as data; `seqpar.loading` checks a file against them and reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TensorSource:
    """The checkpoint keys from which one parameter is made, and the function that combines their tensors.

    raw: it takes tensors as they lie in the file, rather than in the dtype of the parameter.
    """

    keys: tuple[str, ...]
    combine: Callable[..., Tensor] = lambda tensor: tensor
    raw: bool = False


@dataclass(frozen=True)
class KeyMap:
    """How a checkpoint maps to a model.

    sources: parameter -> source. ignored: keys that are not read. repeats: key -> the key whose values it must equal.
    """

    sources: Mapping[str, TensorSource]
    ignored: frozenset[str] = frozenset()
    repeats: Mapping[str, str] = field(default_factory=dict)


def shape_of(shapes: Mapping[str, tuple[int, ...]], key: str, dims: int) -> tuple[int, ...]:
    """Return the shape of a key from which `recognise` reads sizes.

    Raises `ValueError` if the key is missing, has another number of dims than `dims`, or has an empty dim.
    """
    if key not in shapes:
        raise ValueError(
            f"got a checkpoint that lacks {key}, expected a complete one: the model's sizes follow from it"
        )
    if len(shapes[key]) != dims or 0 in shapes[key]:
        raise ValueError(f"got a checkpoint with {key} of shape {shapes[key]}, expected {dims} dims, none empty")
    return shapes[key]


def count_layers(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """Return the number of layers in keys of the form `prefix.N.name`; ValueError if a number below is missing."""
    matches = (re.match(rf"{re.escape(prefix)}\.(\d{{1,9}})\.", key) for key in shapes)
    numbers = {int(match[1]) for match in matches if match}
    lost = next((number for number in range(len(numbers)) if number not in numbers), None)
    if lost is not None:
        raise ValueError(f"got a checkpoint with {prefix}.{max(numbers)} that lacks all of {prefix}.{lost}")
    return len(numbers)
