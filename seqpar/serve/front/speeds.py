"""How long orders take: the mean of the last ones of each model, measured by the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

LAST = 8  # orders of a model that count


class Speeds:
    """Measured seconds a step, and of all else in an order, of each model."""

    def __init__(self) -> None:
        self._measured: dict[str, deque[tuple[float, float]]] = {}

    def measured(self, model: str, steps: int, parts_s: Mapping[str, float]) -> None:
        """Take the seconds of the parts of an order that has ended well; "steps" is the part of all steps."""
        stepping = parts_s.get("steps", 0.0)
        rest = sum(parts_s.values()) - stepping
        self._measured.setdefault(model, deque(maxlen=LAST)).append((stepping / max(1, steps), rest))

    def estimate(self, model: str, steps: int) -> float | None:
        """Return the seconds of an order of so many steps; None before the first one of the model has ended."""
        last = self._measured.get(model)
        return fmean(step for step, _ in last) * steps + fmean(rest for _, rest in last) if last else None
