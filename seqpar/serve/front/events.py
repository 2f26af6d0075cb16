"""What a job's stream hears of it while it waits and runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moved:
    """The queue has changed while the job waits."""


@dataclass(frozen=True)
class Stepped:
    """A step of a picture has been queued. step: from 1 to steps."""

    picture: int
    step: int
    steps: int


@dataclass(frozen=True)
class PartlyMade:
    """The file of a partial picture is there. size: (height, width)."""

    picture: int
    index: int
    size: tuple[int, int]
    file: bytes


@dataclass(frozen=True)
class PictureMade:
    """The file of a picture is there."""

    picture: int


@dataclass(frozen=True)
class JobEnded:
    """The job has ended; nothing follows."""


JobEvent = Moved | Stepped | PartlyMade | PictureMade | JobEnded
