"""Each kernel: its time and bytes a second beside plain torch and torch.compile, against this run's copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.timing import append, command, copy_bandwidth, environment, graphed, in_turn, spread
from seqpar.kernels import adaln, gelu, merge, prepare, swiglu
from seqpar.kernels.adaln import Gated, Norm
from seqpar.protocols import Prepare

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Kernels:
    """Time the elementwise kernels."""

    rows: tuple[int, ...] = (512, 8192, 32768)
    """Token rows (two batch rows of half as many)."""
    width: int = 4096
    """Model width; heads are 128 wide, the feed-forward is 11008."""
    compiled: bool = True
    """Also plain torch under torch.compile."""
    rounds: int = 5
    """Rounds in turn."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Case:
    """One kernel on one input: ours, plain torch's arithmetic, and the bytes that must move."""

    name: str
    kernel: Callable[[], object]
    plain: Callable[[], object]
    bytes: int


def main(args: Kernels) -> None:
    """Measure, print a table, append the lines."""
    ceiling, lines = copy_bandwidth(), []
    print(f"copy: {ceiling / 1e12:.2f} TB/s")
    for rows in args.rows:
        for case in cases(rows, args.width):
            lines.append(measure(args, case, rows, ceiling))
            print(row(lines[-1]), flush=True)
    append(lines, args.out)


def cases(rows: int, width: int) -> Sequence[Case]:
    """All elementwise kernels of a Large-DiT block at this many rows."""
    batch, tokens, heads = 2, rows // 2, width // 128
    x, branch, wide = (rand(batch, tokens, n) for n in (width, width, 2 * 11008))
    table = rand(batch, 6, width, dtype=torch.float32)
    shift, scale, gate = table[:, 0], table[:, 1], table[:, 2]
    gated, norm = Gated(gate, branch), Norm("rms", 1e-5, rand(width))
    packed = rand(batch, tokens, 3, heads, 128)
    q, k = packed.unbind(2)[:2]
    how = Prepare("layer", False, 1e-5, rand(width), rand(width), rand(width), rand(width),
                  rand(tokens, 64, dtype=torch.float32), rand(tokens, 64, dtype=torch.float32))  # fmt: skip
    out, lse = rand(batch, tokens, heads, 128, dtype=torch.float32), rand(batch, heads, tokens, dtype=torch.float32)
    part, part_lse, bias = (
        rand(batch, tokens, heads, 128),
        rand(batch, heads, tokens, dtype=torch.float32),
        rand(2 * 11008),
    )
    stream = x.numel() * 2
    return [
        Case("norm + modulate", lambda: adaln.launch(x, None, shift, scale, norm),
             lambda: adaln.reference(x, None, shift, scale, norm), 2 * stream),
        Case("gate + residual + norm + modulate", lambda: adaln.launch(x, gated, shift, scale, norm),
             lambda: adaln.reference(x, gated, shift, scale, norm), 4 * stream),
        Case("QK-norm + rotary", lambda: prepare.launch(q, k, how), lambda: prepare.reference(q, k, how), 4 * stream),
        Case("SwiGLU", lambda: swiglu.launch(wide), lambda: swiglu.reference(wide), wide.numel() * 3),
        Case("bias + GELU", lambda: gelu.launch(wide, bias), lambda: gelu.reference(wide, bias), wide.numel() * 4),
        Case("merge", lambda: merge.launch(out, lse, part, part_lse),
             lambda: merge.reference(out, lse, part, part_lse), out.numel() * 10),
    ]  # fmt: skip


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random data: zeros run faster than anything real."""
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def measure(args: Kernels, case: Case, rows: int, ceiling: float) -> dict[str, Any]:
    """One line: ms of each way, and the share of the copy bandwidth."""
    ways = {"kernel": graphed(case.kernel), "plain": graphed(case.plain)}
    if args.compiled:
        ways["compiled"] = graphed(torch.compile(case.plain, dynamic=False))
    times = in_turn(ways, args.rounds, max(10, 4_000_000 // rows // 10))
    ms = {way: spread(values) for way, values in times.items()}
    share = case.bytes / (ms["kernel"]["median"] * 1e-3) / ceiling
    case_line = {"kernel": case.name, "rows": rows, "width": args.width, "dtype": "bfloat16"}
    return {"bench": "kernels", "case": case_line, "gpus": 1, "ms": ms["kernel"], "plain_ms": ms["plain"],
            "compiled_ms": ms.get("compiled"), "bytes": case.bytes, "copy_bytes_per_s": ceiling, "share_of_copy": share,
            "command": command(), "env": environment(torch.device("cuda"))}  # fmt: skip


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    compiled = line["compiled_ms"]
    return (f"{line['case']['rows']:>6} rows  {line['case']['kernel']:<34} {1e3 * line['ms']['median']:8.1f} us  "
            f"{100 * line['share_of_copy']:5.1f} % of copy   plain {1e3 * line['plain_ms']['median']:8.1f} us"
            + (f"   compiled {1e3 * compiled['median']:8.1f} us" if compiled else ""))  # fmt: skip
