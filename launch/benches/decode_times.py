"""What decode.py reads: ms of decodings in rounds, memory, and where the time goes by the names of kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from launch.benches.split import split, traced
from seqpar.mesh import Mesh

GIB = 1 << 30
ROUND_MS = 300.0  # short decodings are repeated in a round
MOST_CALLS = 10
# In this order a moment counts for the first kind that runs then. Most "products" are attention's. Through peer memory
# "statistics" are sums of norms, and "collectives" are keys, values and finished strips; with NCCL's collectives all
# exchanges are "collectives", because its kernels have one name.
KINDS = (
    "convolution",
    "attention",
    "products",
    "norm",
    "layout",
    "elementwise",
    "halo",
    "statistics",
    "collectives",
    "gaps",
)
# names are looked for in this order
NAMES = {
    "attention": ("flash", "fmha", "attention", "attn", "weights_kernel"),
    "halo": ("halo", "send_kernel", "take_kernel"),
    "statistics": ("flags_kernel", "push_kernel", "ptop"),
    "collectives": ("nccl",),
    "norm": ("norm", "moments", "welford", "planes_kernel", "pixels_kernel", "combine_kernel"),
    "layout": ("nchwtonhwc", "nhwctonchw", "transpose", "copy", "catarray", "memcpy", "memset", "pad"),
    "convolution": ("conv", "fprop", "cudnn", "winograd", "implicit"),
    "products": ("gemm", "cutlass", "xmma", "nvjet", "cublas", "splitk", "gemv"),
}
Line = dict[str, Any]


def times(step: Callable[[], object] | None, mesh: Mesh, most: int, seconds: float) -> list[float]:
    """Return this rank's ms of one decoding in each round; zeros on a rank that waits. A collective call.

    most: the number of rounds, of which none but the first is started after `seconds`.
    """
    begun, found, calls = time.monotonic(), list[float](), 1
    for index in range(most):
        if index and mesh.share(time.monotonic() - begun > seconds, bool):
            break
        mesh.collect(None, None)  # on the host: no rank's GPU waits
        found.append(sum(once(step, mesh.device) for _ in range(calls)) / calls)
        if not index:
            calls = max(1, min(MOST_CALLS, int(ROUND_MS / max(mesh.collect(found[0], float)))))
    return found


def once(step: Callable[[], object] | None, device: torch.device) -> float:
    """Return ms of one call, by the device's clock where there is one; 0 without a step."""
    if step is None:
        return 0.0
    if device.type != "cuda":
        begun = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def trace(work: Callable[[], object]) -> Line:
    """Return ms of each kind of kernel on this rank, of exchanges only what nothing hides, and the kernels' number."""
    spans = traced(work, 1)
    parts = {kind: us / 1e3 for kind, us in split(spans, KINDS, NAMES).items()}
    return {"split_ms": {kind: ms for kind, ms in parts.items() if ms}, "kernels": len(spans)} if spans else {}


def memory(device: torch.device) -> dict[str, float]:
    """Return GiB of this GPU: the most that was allocated and reserved, and what other than torch's allocator holds.

    The next readings of the most begin anew, with what is allocated now.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    left, whole = torch.cuda.mem_get_info()
    found = {"gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    found["outside_gib"] = whole - left - torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return {name: value / GIB for name, value in found.items()}


def worst(mesh: Mesh, found: dict[str, float]) -> Line:
    """Return the largest of each number over the ranks."""
    ranks = mesh.collect(found, dict[str, float])
    return {name: max(rank[name] for rank in ranks) for name in found}


def free(device: torch.device) -> None:
    """Free what a row held, so that the next row starts from the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
