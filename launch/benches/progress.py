"""Lines that a loading rank prints, and its host memory and disk traffic, as Linux counts them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

BEAT_S = 5  # between the lines of a rank that loads


class Clock:
    """Prints when each phase ends, and every few seconds that this rank still loads; `phases`: name -> seconds."""

    def __init__(self, who: str) -> None:
        self._who, self._began, self._last = who, time.perf_counter(), time.perf_counter()
        self._disk = disk()
        self._over = threading.Event()
        self.phases: dict[str, float] = {}
        threading.Thread(target=self._beat, daemon=True).start()

    def mark(self, phase: str) -> None:
        """Note that a phase has ended."""
        now = time.perf_counter()
        self.phases[phase], self._last = now - self._last, now
        self._say(f"{phase} took {self.phases[phase]:.2f} s")

    def stop(self) -> float:
        """Return the seconds since the start; print no more."""
        self._over.set()
        return time.perf_counter() - self._began

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._say(f"loading, the last phase that ended: {next(reversed(self.phases), 'none')}")

    def _say(self, text: str) -> None:
        fetched, seconds = (disk() - self._disk) / 1e9, time.perf_counter() - self._began
        resident = status("VmRSS") / 1e9
        print(
            f"{self._who}: {seconds:6.2f} s  {text}  ({fetched:.2f} GB from disk, {resident:.2f} GB resident)",
            flush=True,
        )


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def disk() -> int:
    """Bytes that this process had fetched from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
