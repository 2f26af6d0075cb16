"""How long orders take: as the planner predicts, and the mean of a model's last ones once the ranks have made some."""

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

    def estimate(self, model: str, steps: int, step_s: float) -> float:
        """Return the seconds of an order of so many steps. step_s: predicted, for a model that has made none."""
        last = self._measured.get(model, [(step_s, 0.0)])
        return fmean(step for step, _ in last) * steps + fmean(rest for _, rest in last)
