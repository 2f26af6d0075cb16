"""Time of each kernel beside plain torch and torch.compile, and its share of this run's copy bandwidth.

Matrix products with arithmetic in their epilogues (`launch/benches/products.py`) follow, beside cuBLAS and a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from launch.benches import products, timing
from launch.benches.timing import append, command, copy_bandwidth, environment, over, timed_over
from seqpar.kernels import adaln, gelu, merge, prepare, swiglu
from seqpar.kernels.adaln import Gated, Norm
from seqpar.protocols import Prepare

HIDDEN = {1152: 4608, 1536: 4096, 3072: 8192, 4096: 11008}  # feed-forward widths of DiT-XL and Large-DiT


@dataclass(frozen=True)
class Kernels:
    """Time the elementwise kernels and the matrix products with an epilogue."""

    rows: tuple[int, ...] = (512, 8192, 32768)
    """Token rows (two batch rows of half as many)."""
    width: int = 4096
    """Model width; heads are 128 wide, the feed-forward is 11008."""
    compiled: bool = True
    """Also time plain torch under torch.compile."""
    products: bool = True
    """Also time the matrix products."""
    named: str = ""
    """Run only the kernels and products whose name contains this."""
    rounds: int = 5
    """Number of rounds; each round times every way once."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Case:
    """One kernel on inputs of one size: the module with `launch` and `reference`, their inputs, the bytes they move."""

    name: str
    module: ModuleType
    data: Callable[[], tuple[Any, ...]]
    bytes: int

    def sets(self) -> list[tuple[Any, ...]]:
        """Inputs of so many calls that none is in the cache when used again (at least half of `bytes` is read)."""
        return [self.data() for _ in range(over(self.bytes // 2))]


def main(args: Kernels) -> None:
    """Measure, print a table, append the lines."""
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    for rows in args.rows:
        for case in cases(rows, args.width):
            if args.named in case.name:
                line = measure(args, case, rows, bandwidth)
                print(row(line), flush=True)
                append([line], args.out)
    if args.products:
        products.main(args.rows, args.rounds, args.out, args.named)


def cases(rows: int, width: int, device: str = "cuda") -> Sequence[Case]:
    """All elementwise kernels of a block at this number of rows; `Case.data` makes the inputs."""
    rand = partial(timing.rand, device=device)
    batch, tokens, hidden = 2, rows // 2, HIDDEN.get(width, 4 * width)
    heads = 16 if width < 2048 else 32
    stream, wide, fp32 = (batch, tokens, width), (batch, tokens, 2 * hidden), torch.float32

    def modulated(branched: bool) -> tuple[Any, ...]:
        gate, shift, scale = rand(batch, 6, width, dtype=fp32)[:, :3].unbind(1)
        gated = Gated(gate, rand(*stream)) if branched else None
        return rand(*stream), gated, shift, scale, Norm("rms", 1e-5, rand(width))

    def projected() -> tuple[Any, ...]:
        q, k = rand(batch, tokens, 3, heads, width // heads).unbind(2)[:2]
        cos, sin = (rand(tokens, width // heads // 2, dtype=fp32) for _ in range(2))
        weight, bias, k_weight, k_bias = (rand(width) for _ in range(4))
        return q, k, Prepare("layer", False, 1e-5, weight, bias, k_weight, k_bias, cos, sin)

    elements = rows * width
    return [
        Case("norm + modulate", adaln, lambda: modulated(False), 4 * elements),
        Case("gate + residual + norm + modulate", adaln, lambda: modulated(True), 8 * elements),
        Case("QK-norm + rotary", prepare, projected, 8 * elements),
        Case("SwiGLU", swiglu, lambda: (rand(*wide),), 6 * rows * hidden),
        Case("bias + GELU", gelu, lambda: (rand(*wide), rand(2 * hidden)), 8 * rows * hidden),
        Case("merge", merge, lambda: tuple(_parts(rand, batch, tokens, heads, width // heads)), 10 * elements),
    ]


def _parts(rand: Callable[..., Tensor], batch: int, tokens: int, heads: int, dim: int) -> Iterator[Tensor]:
    """Two partial attentions: the state in fp32, what is merged into it in bf16, each with its log-sum-exp."""
    for dtype in (torch.float32, torch.bfloat16):
        yield rand(batch, tokens, heads, dim, dtype=dtype)
        yield rand(batch, heads, tokens, dtype=torch.float32)


def measure(args: Kernels, case: Case, rows: int, bandwidth: float) -> dict[str, Any]:
    """One line: ms of each way, and the share of the copy bandwidth."""
    ways = {"kernel": case.module.launch, "plain": case.module.reference}
    if args.compiled:
        ways["compiled"] = torch.compile(case.module.reference, dynamic=False)
    ms = timed_over(ways, case.sets(), args.rounds)
    share = case.bytes / (ms["kernel"]["median"] * 1e-3) / bandwidth
    case_line = {"kernel": case.name, "rows": rows, "width": args.width, "dtype": "bfloat16"}
    return {
        "bench": "kernels",
        "case": case_line,
        "gpus": 1,
        "ms": ms["kernel"],
        "plain_ms": ms["plain"],
        "compiled_ms": ms.get("compiled"),
        "bytes": case.bytes,
        "copy_bytes_per_s": bandwidth,
        "share_of_copy": share,
        "command": command(),
        "env": environment(torch.device("cuda")),
    }


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    compiled = line["compiled_ms"]
    return (
        f"{line['case']['rows']:>6} rows  {line['case']['kernel']:<34} {1e3 * line['ms']['median']:8.1f} us  "
        f"{100 * line['share_of_copy']:5.1f} % of copy   plain {1e3 * line['plain_ms']['median']:8.1f} us"
        + (f"   compiled {1e3 * compiled['median']:8.1f} us" if compiled else "")
    )
