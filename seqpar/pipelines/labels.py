"""Class names and numbers: the labels that a pipeline folder lists, and what a user may call them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from seqpar.loading.schedulers import near


def listed(index: Mapping[str, Any], classes: int) -> dict[int, tuple[str, ...]]:
    """Return class number -> its names, from a folder's model_index.json; ValueError for a class that does not exist.

    classes: the model's number of classes.
    """
    labels = index.get("id2label") or {}
    odd = [key for key in labels if not key.isdecimal() or int(key) >= classes]
    if odd:
        raise ValueError(f"got a label for class {odd[0]!r} in model_index.json, expected numbers 0 to {classes - 1}")
    return {int(key): _parts(str(names)) for key, names in labels.items()}


def class_ids(
    classes: Sequence[str | int], labels: Mapping[int, tuple[str, ...]], numbers: Collection[int]
) -> list[int]:
    """Return the class number of each name, whole label ("tench, Tinca tinca") or number.

    labels: class number -> its names. numbers: all class numbers. Raises ValueError for an unknown class, with similar
    names, and for a name of several classes, with their numbers.
    """
    if all(isinstance(label, int) and label in numbers for label in classes):
        return list(map(int, classes))
    names = dict[str, set[int]]()
    for number, own in labels.items():
        for name in own:
            names.setdefault(name, set()).add(number)
    return [_class_id(str(label), names, numbers) for label in classes]


def _class_id(label: str, names: Mapping[str, set[int]], numbers: Collection[int]) -> int:
    # a whole label stands for the classes that all of its parts have in common
    common = set.intersection(*(names.get(part, set()) for part in _parts(label)))
    if len(common) == 1:
        return common.pop()
    if common:
        raise ValueError(f"got class {label!r}, which stands for {_and(common)}, expected one of these numbers")
    if label.isdecimal() and int(label) in numbers:
        return int(label)
    wanted = f"one of {near(label, list(names))}, or" if names else "a number"
    raise ValueError(f"got class {label!r}, expected {wanted} 0 to {max(numbers)}")


def _parts(label: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in label.split(","))


def _and(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
