"""Names that a request may have: classes of a model, and the known names that are most like an unknown one.

No torch import: the API server looks names up as its ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

LONGEST = 20  # digits of a class


def near(name: str, known: Sequence[str], ending: str = "") -> str:
    """Return the known names that are most like this one, or the first ones, as text for a message.

    ending: of all names, which makes none more alike.
    """
    lower = {other.removesuffix(ending).lower(): other for other in known}
    wanted = name.removesuffix(ending).lower()
    alike = [lower[other] for other in lower if wanted and wanted in other][:5]
    alike = alike or [lower[other] for other in get_close_matches(wanted, lower, n=5, cutoff=0.4)]
    return ", ".join(alike or [*known[:8], f"... ({len(known)} in all)"])


def class_number(label: str, labels: Mapping[int, Sequence[str]]) -> int:
    """Return the number of a class from one of its names, its whole label ("tench, Tinca tinca"), or the number.

    labels: number -> names, of all classes. ValueError for an unknown class, with similar names, and for a name of
    several classes, with their numbers.
    """
    names = dict[str, set[int]]()
    for number, own in labels.items():
        for name in own:
            names.setdefault(name, set()).add(number)
    # a whole label stands for the classes that all of its parts have in common
    common = set.intersection(*(names.get(part, set()) for part in parts(label)))
    if len(common) == 1:
        return common.pop()
    if common:
        several = " and ".join(map(str, sorted(common)))
        raise ValueError(f"got class {label!r}, which stands for {several}, expected one of these numbers")
    if label.isdecimal() and len(label) < LONGEST and int(label) in labels:
        return int(label)
    wanted = f"one of {near(label, list(names))}, or" if names else "a number"
    raise ValueError(f"got class {label!r}, expected {wanted} 0 to {max(labels)}")


def parts(label: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in label.split(","))
