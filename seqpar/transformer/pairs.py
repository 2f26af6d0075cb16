"""Whether a pipeline calls its transformer twice a step, as its last calls show.

A call is promised, to be computed beside the next one (`promises.py`), only where the next one is known to come in the
same step and with the same module: an earlier step had two such calls. A module that changes in the middle of steps, as
a guider's hooks or adapters for one branch do, ends that.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

MANY = 3  # calls in a row without a partner, after which a cfg axis has nothing to split
SOON = 8  # calls; a module that changed twice within them goes on changing


class Pairs:
    """What the last calls tell of the next ones. `see` every call, and then `changed` if the module has changed."""

    def __init__(self) -> None:
        self._known = False  # whether a step had two calls of the same module
        self._index = 0  # of the last call in its step
        self._latents: ref[Any] | None = None
        self._labels: set[str | None] = set()  # of the calls of the step
        self._count = self._single = 0
        self._changes = (-SOON, -SOON)  # the numbers of the last two calls before which the module changed

    @property
    def expected(self) -> bool:
        """Return whether the call that was seen last is the first of two that can be computed together."""
        return self._known and self._index == 0

    @property
    def lonely(self) -> bool:
        """Return whether several calls in a row came without a partner."""
        return self._single >= MANY

    @property
    def restless(self) -> bool:
        """Return whether the module keeps changing, so that a captured call would not be replayed."""
        return self._count - self._changes[0] <= SOON

    def see(self, latents: Any, label: str | None) -> None:
        """Take note of a call by its label, or by its latents, which are one object in all calls of a step."""
        latents = latents[0] if isinstance(latents, list) and latents else latents
        same = self._latents is not None and latents is not None and self._latents() is latents
        begins = not same if label is None else label in self._labels
        if begins or not self._count:
            self._single = self._single + 1 if self._index == 0 else 0
            self._index, self._labels = 0, {label}
        else:
            self._index += 1
            self._labels.add(label)
        self._known = self._known or self._index == 1
        self._latents = ref(latents) if isinstance(latents, Tensor) else None
        self._count += 1

    def changed(self) -> None:
        """Take note that the module has changed between the last call and this one."""
        self._known = False
        self._changes = self._changes[1], self._count

    def alone(self) -> None:
        """Take note that a promised call was read before a second one came."""
        self._known = False
