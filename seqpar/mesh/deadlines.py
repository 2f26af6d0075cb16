"""How long ranks wait for each other: longer while kernels compile and graphs are captured, shorter afterwards.

When it wins: a run in which a rank died or was stopped ends with a message instead of a hang, and a first call that
compiles for a minute is not taken for one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

LONGEST_S = 10**6  # of any deadline: 11 days; timers of process groups count in 64-bit nanoseconds
# calls with the longer deadline: a rank can end its second call only when every other rank has ended its first one
FIRST_CALLS = 2
KINDS = 256  # kinds of calls that are remembered; a forgotten kind has the longer deadline again


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank waits for another one before all ends with an error that names the late rank.

    first_s: in exchanges, until all ranks have finished the first call of a shape or CUDA graph. later_s: in exchanges
    after that. host_s: for a rank that lives but works on its host, as while it loads weights, encodes prompts or
    writes pictures. A rank that has ended is noticed at once; one that was stopped, after first_s or later_s.
    Raises ValueError if a deadline is not a number from above 0 to 10^6 seconds.
    """

    first_s: float = 120.0
    later_s: float = 30.0
    host_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("first_s", "later_s", "host_s"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 < value <= LONGEST_S:
                raise ValueError(
                    f"got a deadline {name}={value!r}, expected seconds, more than 0 and at most {LONGEST_S}"
                )


class Calls:
    """Counts calls of each kind, as to tell those that have the longer deadline; the number of kinds is bounded."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def is_first(self, kind: Hashable) -> bool:
        """Count a call, and return whether not all ranks are known to have finished the first call of its kind."""
        return self.before(kind) < FIRST_CALLS

    def before(self, kind: Hashable) -> int:
        """Count a call, and return how many of its kind came before."""
        before = self._counts.pop(kind, 0)
        self._counts[kind] = before + 1
        if len(self._counts) > KINDS:
            self._counts.popitem(last=False)
        return before

    def knows(self, kind: Hashable) -> bool:
        """Return whether a call of this kind was counted, without counting one."""
        return kind in self._counts

    def forget(self, kind: Hashable) -> None:
        """Count calls of a kind anew, as after its capture as a CUDA graph."""
        self._counts.pop(kind, None)
