"""The faults that a job of two ranks must end well under, and what "well" means for each of them."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Literal

from launch.benches.fault_job import Outcome, Signal
from launch.benches.planted import Plant

MORE_S = 5.0  # every process is gone this long after its deadline
CONTINUED_S = 10.0
LATE = r"timed out|late|did not"
KILLED = "error: rank {rank} was ended by SIGKILL"


@dataclass(frozen=True)
class Case:
    """One fault. message: a pattern of the last line, code: the exit code of the command.

    within: which deadline may pass before all processes are gone: none, the one of later calls, or that of first calls.
    in_place: only for transports whose ranks write into each other's memory.
    A job that survives its fault (code 0) must leave the picture of a job without one, bit by bit; any other no file.
    """

    name: str
    plant: Plant
    code: int
    message: str = ""
    signals: tuple[Signal, ...] = ()
    within: Literal["nothing", "first", "later"] = "nothing"
    in_place: bool = False


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank waits for another: in first calls of a shape, and later; and until all processes are gone."""

    first: float
    later: float
    more: float = MORE_S

    def flags(self) -> tuple[str, ...]:
        """Return the flags of the command."""
        return "--first-deadline-s", f"{self.first:g}", "--deadline-s", f"{self.later:g}"

    def bound(self, case: Case) -> float | None:
        """Return the seconds after which no process may be left; None for a job that goes on."""
        if case.code == 0:
            return None
        return self.more + {"nothing": 0.0, "first": self.first, "later": self.later}[case.within]


def _later(number: signal.Signals, after_s: float = 0.3) -> tuple[Signal, ...]:
    return (Signal(number, after_s),)


NOTHING = Case("nothing", Plant("nothing"), 0)
CASES = (
    Case("rank 1 killed", Plant("kill"), 137, KILLED.format(rank=1)),
    Case("rank 0 killed", Plant("kill", rank=0), 137, KILLED.format(rank=0)),
    Case("rank 1 stopped in a step", Plant("stop"), 1, rf"rank 1.*({LATE})|({LATE}).*rank 1", within="later"),
    Case("rank 0 stopped in a step", Plant("stop", rank=0), 1, rf"rank 0.*({LATE})|({LATE}).*rank 0", within="later"),
    Case("rank 1 stopped in its first exchange", Plant("stop", "exchange", at=0), 1, "rank 1", within="first"),
    Case("rank 1 never starts", Plant("stop", "start"), 1, "rank 1", within="first"),
    Case("rank 1 stopped for a while", Plant("stop"), 0, signals=(Signal(signal.SIGCONT, CONTINUED_S, "stopped"),)),
    Case("rank 1 late at every exchange", Plant("late", "exchange"), 0),
    # on GPUs the host runs ahead, so that the others may still wait in a first call
    Case("rank 1 leaves with code 0", Plant("leave"), 1, "rank 1", within="first"),
    Case("rank 1 raises", Plant("raise"), 1, "planted bug"),
    Case("rank 1 out of memory", Plant("memory"), 1, "rank 1.*memory"),
    Case("rank 1 killed while an arena is made", Plant("kill", "arena"), 137, KILLED.format(rank=1), in_place=True),
    Case("Ctrl-C in a step", Plant("slow"), 130, "stopped", _later(signal.SIGINT)),
    Case("Ctrl-C while the picture is written", Plant("slow", "write", 0), 130, "stopped", _later(signal.SIGINT)),
    Case("terminated while the picture is written", Plant("slow", "write", 0), 143, "stopped", _later(signal.SIGTERM)),
    Case("starter killed", Plant("slow"), -9, signals=_later(signal.SIGKILL)),
    Case("disk full while the picture is written", Plant("disk", "write", 0), 1, "No space left on device"),
)


def wrong(
    case: Case, outcome: Outcome, deadlines: Deadlines, bits: str | None, message: str | None = None
) -> list[str]:
    """Return what is not as it must be, nothing if all is.

    bits: the digest of a job without a fault; message: the line that says how the job ended, the last one by default.
    """
    message = outcome.message if message is None else message
    found = [f"left {name}" for name in outcome.left]
    if outcome.code != case.code:
        found.append(f"exit code {outcome.code}, expected {case.code}")
    if not re.search(case.message, message):
        found.append(f"message {message!r}, expected {case.message!r}")
    bound = deadlines.bound(case)
    if bound is not None and outcome.seconds > bound:
        found.append(f"gone after {outcome.seconds:.1f} s, expected {bound:g}")
    if outcome.picture != (case.code == 0):
        found.append("no picture" if case.code == 0 else "a picture")
    if case.code == 0 and bits is not None and outcome.digest != bits:
        found.append(f"latents {outcome.digest}, expected {bits}")
    return found


def for_a_while(case: Case, seconds: float) -> Case:
    """Return the case with ranks that are stopped for another time."""
    signals = (replace(each, after_s=seconds) if each.number == signal.SIGCONT else each for each in case.signals)
    return replace(case, signals=tuple(signals))
