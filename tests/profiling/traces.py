"""Traces as torch.profiler writes them, of runs that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from seqpar.profiling.trace import BLOCK, CLOCK, OUTSIDE, STEP, Event, RankTrace, what_of

Kernel = tuple[str, float, float]
"""Its name, and when it starts and ends."""


def annotation(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": start, "dur": end - start}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return annotation(f"{STEP}{number}", start, end)


def block(name: str, start: float, end: float) -> dict[str, Any]:
    return annotation(BLOCK + name, start, end)


def meeting(start: float, end: float) -> dict[str, Any]:
    return annotation(CLOCK, start, end)


def launch(number: int, at: float, name: str = "cudaLaunchKernel", category: str = "cuda_runtime") -> dict[str, Any]:
    args = {"correlation": number}
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": at, "dur": 0.5, "args": args}


def kernel(number: int, name: str, start: float, end: float, stream: int = 20) -> dict[str, Any]:
    args, category = {"correlation": number, "stream": stream}, "gpu_memcpy" if "Memcpy" in name else "kernel"
    return {
        **{"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream},
        **{"ts": start, "dur": end - start, "args": args},
    }


def operation(name: str, start: float, end: float, thread: int = 7) -> dict[str, Any]:
    category = "user_annotation" if name.startswith("gloo:") else "cpu_op"
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": end - start}


def trace(events: Iterable[dict[str, Any]], base_ns: int = 0) -> dict[str, Any]:
    return {"baseTimeNanoseconds": base_ns, "traceEvents": list(events)}


def rank(kernels: Sequence[Kernel], inside: bool = True, base_ns: int = 0, ahead: float = 0.0) -> RankTrace:
    """Return what a rank's trace tells, in one step of 100 us; ahead: by how much its clock is."""
    where = "a" if inside else OUTSIDE
    ran = [Event(name, what_of(name), start + ahead, end + ahead, 0, where) for name, start, end in kernels]
    met = ((ahead - 30, ahead - 10), (ahead - 9, ahead - 1))
    return RankTrace(base_ns, met, {0: (ahead, 100 + ahead)}, tuple(ran), ((ahead, where),))
