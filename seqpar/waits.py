"""What a rank waits for, why another one is late for it, and what the error says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from seqpar.pulse import Sign

# what a process group says when other ranks did not come or closed their connections
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "connection refused")


@dataclass(frozen=True)
class Wait:
    """What is waited for. ranks: of the process group. key, count: what each of them has begun if it has come so far.

    limit_s: how long a rank may show no sign of life, or not begin it; with `busy` it may begin it later.
    """

    what: str
    ranks: tuple[int, ...]
    key: str
    count: int
    limit_s: float
    busy: bool = False
    event: torch.cuda.Event | None = None


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error says that other ranks did not come or closed their connections.

    A process group tells of both with plain RuntimeErrors that differ only in their texts.
    """
    return any(word in str(error).lower() for word in LOST)


def why_late(wait: Wait, sign: Sign, start: float, waited: float) -> str | None:
    """Return why a rank is late for a wait, by its last sign, or None. start, waited: since when, and how long."""
    behind = sign.begun.get(wait.key, 0) < wait.count
    if sign.left and behind:
        return "its process has ended by itself"
    if (silent := sign.silent_s(start)) > wait.limit_s:
        return f"it has shown no sign of life for {round(silent, 1):g} s: it died or is stopped"
    if behind and not wait.busy and waited > wait.limit_s:
        return "it lives, but has not begun this call"
    return None


def text_of_late(rank: int, wait: Wait, waited: float, reasons: Mapping[int, str]) -> str:
    """Return the error of a rank that waited for others. waited: seconds. reasons: late rank -> why it is late."""
    ranks, whose = ", ".join(map(str, reasons)), "; ".join(dict.fromkeys(reasons.values()))
    return f"rank {rank} waited {round(waited, 1):g} s in vain for rank {ranks} ({wait.what}); {whose}; see its output"


def text_of_unknown(rank: int, wait: Wait, waited: float, more: str) -> str:
    """Return the error of a rank that does not know for which other one it waited. more: what it knows instead."""
    return (
        f"rank {rank} waited {round(waited, 1):g} s in vain for another rank of {list(wait.ranks)} ({wait.what}); "
        f"{more}; it died, is stuck, or did not make this call: see the output of the other ranks"
    )
