"""Where a step's time goes: matrix products, attention, elementwise, exchange that nothing hides, gaps.

From the kernels of a profiler's trace, by their names: each moment belongs to the first of these kinds that runs then,
so exchange counts only where nothing is computed under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

KINDS: tuple[str, ...] = ("GEMM", "attention", "elementwise", "exchange exposed", "gaps")
NAMES: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "sdpa", "attention", "attn"),  # before GEMM: some are built with its library
    "exchange exposed": ("nccl", "flags_kernel", "push_kernel", "memcpy"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
}
Span = tuple[str, float, float]
"""A kernel: name, start, end."""


def kind_of(kernel: str) -> str:
    """Of `KINDS`, by what a kernel is called; elementwise is the rest."""
    name = kernel.lower()
    return next((kind for kind, parts in NAMES.items() if any(part in name for part in parts)), "elementwise")


def split(spans: Iterable[Span]) -> dict[str, float]:
    """How long each kind is on, from the first kernel's start to the last one's end; in the spans' unit."""
    edges: list[tuple[float, int, str]] = []
    for name, start, end in spans:
        edges += [(start, 1, kind_of(name)), (end, -1, kind_of(name))]
    running, took = dict.fromkeys(KINDS[:-1], 0), dict.fromkeys(KINDS, 0.0)
    before = 0.0
    for index, (now, change, kind) in enumerate(sorted(edges, key=lambda edge: edge[0])):
        if index:
            took[next((kind for kind in KINDS[:-1] if running[kind]), "gaps")] += now - before
        running[kind] += change
        before = now
    return took


def traced(step: Callable[[], object], steps: int) -> list[Span]:
    """The kernels of some steps on this GPU, in us; none where the profiler saw none."""
    # one session, its own start left out: a second one soon after may find nothing
    session = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=session, acc_events=True) as found:
        step()
        torch.cuda.synchronize()
        found.step()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events: Any = found.events()
    return [(event.name, event.time_range.start, event.time_range.end) for event in events
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)]  # fmt: skip


def split_of(step: Callable[[], object], steps: int) -> dict[str, float] | None:
    """ms a step of each kind, on this rank; None where nothing was seen. With peer memory the stores of q, k, v and the
    wait for those of other ranks are the prepare kernel's, so they count as elementwise."""
    spans = traced(step, steps)
    return {kind: us / 1e3 / steps for kind, us in split(spans).items()} if spans else None
