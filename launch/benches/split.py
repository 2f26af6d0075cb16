"""Time of a step by kind of kernel: matrix products, attention, elementwise, exposed exchange, gaps.

Kernels of a profiler's trace are sorted by their names. Each moment counts for the first kind that runs then, so an
exchange counts only while nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

KINDS: tuple[str, ...] = ("GEMM", "attention", "elementwise", "exchange exposed", "gaps")
NAMES: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "sdpa", "attention", "attn"),  # before GEMM: some have its library's name
    "exchange exposed": ("nccl", "flags_kernel", "push_kernel", "memcpy"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
}
Span = tuple[str, float, float]
"""One kernel: its name, start and end."""


def kind_of(kernel: str, names: Mapping[str, tuple[str, ...]] = NAMES) -> str:
    """The kind of a kernel by its name; kernels with other names are elementwise."""
    name = kernel.lower()
    return next((kind for kind, parts in names.items() if any(part in name for part in parts)), "elementwise")


def split(
    spans: Iterable[Span], kinds: Sequence[str] = KINDS, names: Mapping[str, tuple[str, ...]] = NAMES
) -> dict[str, float]:
    """Time of each kind from the first kernel's start to the last one's end, in the unit of the spans.

    kinds: those of `names` and "elementwise" in the order in which they count, and "gaps" last.
    """
    edges: list[tuple[float, int, str]] = []
    for name, start, end in spans:
        edges += [(start, 1, kind_of(name, names)), (end, -1, kind_of(name, names))]
    running, took = dict.fromkeys(kinds[:-1], 0), dict.fromkeys(kinds, 0.0)
    before = 0.0
    for index, (now, change, kind) in enumerate(sorted(edges, key=lambda edge: edge[0])):
        if index:
            took[next((kind for kind in kinds[:-1] if running[kind]), "gaps")] += now - before
        running[kind] += change
        before = now
    return took


def traced(step: Callable[[], object], steps: int) -> list[Span]:
    """The kernels of `steps` steps on this GPU, in us; empty if the profiler saw none."""
    # one session with a warm-up step: a second session soon after may find nothing
    session = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=session, acc_events=True) as found:
        step()
        torch.cuda.synchronize()
        found.step()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events: Any = found.events()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


def split_of(step: Callable[[], object], steps: int) -> dict[str, float] | None:
    """ms a step of each kind on this rank; None if the profiler saw no kernel.

    With peer memory the prepare kernel stores q, k, v and waits for other ranks, so this counts as elementwise.
    """
    spans = traced(step, steps)
    return {kind: us / 1e3 / steps for kind, us in split(spans).items()} if spans else None
