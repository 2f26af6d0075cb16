"""What Triton makes of our launches for an H100 or H200, on a machine without one.

A launch runs as models run it, on CPU tensors, up to the point where the kernel would start: the specialisation on
alignments, strides and missing tensors is therefore the real one. Needs no GPU, but `TRITON_INTERPRET` must not be set:
`tests/test_kernel_compiles.py` starts it as a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from seqpar.kernels import adaln, ddim, gelu, merge, prepare, swiglu
from seqpar.kernels.adaln import Gated, Norm
from seqpar.protocols import Outbox, Outboxes, Prepare

BF16 = torch.bfloat16
HOPPER = GPUTarget("cuda", 90, 32)


class NoDriver:
    """As much of a driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


def kernels_of(launch: Callable[[], object]) -> list[Any]:
    """The compiled kernels that `launch` would have started, in order."""
    found, run = [], JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(NoDriver())  # pyright: ignore[reportArgumentType]
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def facts(kernel: Any) -> dict[str, Any]:
    """Widths of global accesses in bytes -> how many stand in the PTX; registers, spills and barriers."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    return {
        "name": kernel.metadata.name,
        "loads": widths(ptx, "ld.global"),
        "stores": widths(ptx, "st.global"),
        "registers": int(told.split("REG:")[1].split()[0]),
        "spilled": sum(int(told.split(f"{where}:")[1].split()[0]) for where in ("STACK", "LOCAL")),
        "shared": kernel.metadata.shared,
        "barriers": ptx.count("bar.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "tma": ptx.count("cp.async.bulk.tensor"),
    }


def widths(ptx: str, operation: str) -> dict[int, int]:
    """Bytes of one access -> how many there are."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(rf"\b{re.escape(operation)}[^\s]*?(?:\.v(\d))?\.[a-z](\d+)\s", ptx):
        size = int(vector or 1) * int(bits) // 8
        counts[size] = counts.get(size, 0) + 1
    return counts


def launches() -> dict[str, Callable[[], object]]:
    """Every kernel of `seqpar/kernels` on rows as wide as the 7B's, the 3B's or DiT-XL/2's; few rows are enough."""
    made: dict[str, Callable[[], object]] = {}
    for width, kind in ((4096, "rms"), (3072, "rms"), (1152, "layer")):
        made |= adaln_launches(width, Norm(kind, 1e-5, rows(width) if kind == "rms" else None))
    for heads, dim in ((32, 128), (32, 96), (16, 72)):
        made |= prepare_launches(heads, dim)
    made["swiglu 11008"] = lambda: swiglu.launch(rows(2, 8, 2 * 11008))
    made["gelu 4608"] = lambda: gelu.launch(rows(2, 8, 4608), rows(4608))
    state = torch.zeros(2, 32, 32, 128), torch.zeros(2, 32, 32)
    made["merge 128"] = lambda: merge.launch(*state, state[0].to(BF16), state[1].clone())
    step, outputs = torch.zeros((), dtype=torch.int64), rows(1, 16, 32)
    update = ddim.Update(torch.zeros(25, 7), 4.0, clip=1.0)
    made["ddim 16"] = lambda: ddim.launch(torch.zeros(1, 16, 16), outputs, outputs, update, step, step.clone())
    return made


def adaln_launches(width: int, norm: Norm) -> dict[str, Callable[[], object]]:
    """Without a branch, with one, and rows that do not start on 16 bytes."""
    x, padded, table = rows(2, 8, width), rows(2, 8, width + 1)[..., :width], torch.zeros(2, 6, width)
    shift, scale, gated = table[:, 0], table[:, 1], Gated(table[:, 2], rows(2, 8, width))
    return {
        f"norm {width}": lambda: adaln.launch(x, None, shift, scale, norm),
        f"gate {width}": lambda: adaln.launch(x, gated, shift, scale, norm),
        f"norm {width} unaligned": lambda: adaln.launch(padded, None, shift, scale, norm),
    }


def prepare_launches(heads: int, dim: int) -> dict[str, Callable[[], object]]:
    """LayerNorm over all heads and rotary, into tensors and into the outboxes of two readers."""
    q, k, v = rows(2, 8, 3, heads, dim).unbind(2)
    halves = [slice(0, heads // 2), slice(heads // 2, heads)]
    boxes = Outboxes(Outbox(*rows(8, 2, 3, heads // 2, dim).unbind(2), half, half) for half in halves)
    angles = torch.zeros(8, dim // 2)
    how = Prepare("layer", False, 1e-5, *(rows(heads * dim) for _ in range(4)), angles, angles)
    return {
        f"prepare {heads} x {dim}": lambda: prepare.launch(q, k, how),
        f"outboxes {heads} x {dim}": lambda: prepare.launch_into(q, k, v, how, boxes),
    }


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def main() -> None:
    """All of them: one JSON object, name -> facts."""
    print(json.dumps({name: [facts(kernel) for kernel in kernels_of(launch)] for name, launch in launches().items()}))


if __name__ == "__main__":
    main()
