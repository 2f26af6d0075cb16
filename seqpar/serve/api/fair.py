"""Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996): whose request the ranks run next.

Each key has a start tag, in seconds of the ranks divided by the key's weight; the least one is next. A key that was
idle starts at the virtual time, the tag of the running request: it is owed nothing, and nobody is before it for long.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FairShares:
    """Tags of keys. Costs are seconds of the ranks divided by the weight of the key."""

    now: float = 0.0  # the virtual time
    _finish: dict[str, float] = field(default_factory=dict[str, float])  # of each key's last request, if after `now`

    def tag(self, key: str) -> float:
        """The start tag of the next request of a key."""
        return self._finish.get(key, self.now)

    def begin(self, key: str, cost: float) -> None:
        """A request of the key with the least tag among those that wait begins. cost: as predicted."""
        self.now = self.tag(key)
        self._finish = {other: finish for other, finish in self._finish.items() if finish > self.now}
        self._finish[key] = self.now + cost

    def end(self, key: str, cost: float) -> None:
        """The request that began last, which was of this key, has ended. cost: as measured."""
        self._finish[key] = self.now + cost

    def rest(self) -> None:
        """Nothing runs or waits: the next ones all begin equal."""
        self._finish.clear()

    def copy(self) -> FairShares:
        return FairShares(self.now, dict(self._finish))
