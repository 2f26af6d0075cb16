"""Tables for people from the JSON lines of `launch/bench.py`: Markdown on standard output.

python launch/table.py docs/benchmarks/2026-11-20-h200.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """All tables that the lines of a file make."""
    lines = [json.loads(text) for text in Path(path).read_text().splitlines()]
    print("\n\n".join(tables(lines)))


def tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Steps (best layouts, all layouts), ladder, kernels, products, tiles: those there are lines for."""
    makers = (("steps", best), ("steps", every), ("ladder", ladder), ("kernels", kernels), ("products", products),
              ("tiles", tiles))  # fmt: skip
    kinds = {kind: [line for line in lines if line["bench"] == kind] for kind, _ in makers}
    return [make(kinds[kind]) for kind, make in makers if kinds[kind]]


def ladder(lines: Sequence[dict[str, Any]]) -> str:
    """ms a step of each way of computing it, against the ceiling of the same run."""
    rows = []
    for line in lines:
        case, ms = line["case"], line["ms"]
        span, share = f"{ms['min']:.2f} - {ms['max']:.2f}", f"{ms['median'] / line['ceiling_ms']:.3f}"
        cells = [case["model"], str(case["tokens"]), case["way"], f"{ms['median']:.2f}", span, share]
        rows.append([*cells, f"{line['tflops']:.0f}"])
    return _table(["model", "tokens", "way", "ms", "least - most", "x ceiling", "TFLOP/s"], rows)


def kernels(lines: Sequence[dict[str, Any]]) -> str:
    """us of each kernel, its share of the copy bandwidth of the same run, and plain torch's us."""
    rows = []
    for line in lines:
        case, us = line["case"], 1e3 * line["ms"]["median"]
        rows.append([case["kernel"], str(case["rows"]), f"{us:.1f}", f"{100 * line['share_of_copy']:.0f} %",
                     f"{1e3 * line['plain_ms']['median']:.0f}"])  # fmt: skip
    return _table(["kernel (7B widths)", "rows", "us", "of copy bandwidth", "plain torch, us"], rows)


def products(lines: Sequence[dict[str, Any]]) -> str:
    """us of each way of a matrix product with what follows it, TFLOP/s, and the error against fp32 arithmetic."""
    rows = []
    for line in lines:
        case, error = line["case"], "" if line["error"] is None else f"{line['error']:.1e}"
        us, tflops = f"{1e3 * line['ms']['median']:.1f}", f"{line['tflops']:.0f}"
        rows.append([case["product"], str(case["rows"]), case["way"], us, tflops, error])
    return _table(["product", "rows", "way", "us", "TFLOP/s", "error"], rows)


def tiles(lines: Sequence[dict[str, Any]]) -> str:
    """The fastest tile of each kernel, width and number of rows, beside today's."""
    rows, told = [], ("kernel", "width", "rows")
    for at in dict.fromkeys(tuple(line["case"][name] for name in told) for line in lines):
        mine = [line for line in lines if tuple(line["case"][name] for name in told) == at]
        fastest, today = min(mine, key=_median), next(line for line in mine if line["case"]["tile"] == "today")
        times = [f"{1e3 * _median(x):.1f} us, {100 * x['share_of_copy']:.0f} %" for x in (today, fastest)]
        rows.append([*map(str, at), *times, fastest["case"]["tile"]])
    return _table(["kernel", "width", "rows", "today, of copy", "fastest, of copy", "tile"], rows)


def best(lines: Sequence[dict[str, Any]]) -> str:
    """ms a step of the fastest layout for each token count and number of GPUs."""
    gpus, tokens = sorted({line["gpus"] for line in lines}), sorted({line["case"]["tokens"] for line in lines})
    rows = []
    for count in tokens:
        fastest = {n: min(_of(lines, count, n), key=_median) for n in gpus}
        one = _median(fastest[gpus[0]])
        gains = {n: f" ({one / _median(x):.2f} x, {_layout(x)})" if n > 1 else "" for n, x in fastest.items()}
        cells = [f"{_median(line):.1f}{gains[n]}" for n, line in fastest.items()]
        rows.append([str(count), *cells])
    return _table(["tokens", *(f"{n} GPU{'s' if n > 1 else ''}" for n in gpus)], rows)


def every(lines: Sequence[dict[str, Any]]) -> str:
    """ms a step (least - most) of every layout on the most GPUs, and whether the latents have one GPU's bits."""
    most, tokens = max(line["gpus"] for line in lines), sorted({line["case"]["tokens"] for line in lines})
    bits = {count: _of(lines, count, 1)[0]["digest"] for count in tokens}
    rows = []
    for layout in dict.fromkeys(line["case"]["layout"] for line in lines if line["gpus"] == most):
        mine = [next(x for x in _of(lines, count, most) if x["case"]["layout"] == layout) for count in tokens]
        same = all(line["digest"] == bits[count] for line, count in zip(mine, tokens, strict=True))
        cells = [f"{_median(x):.1f} ({x['ms']['min']:.1f} - {x['ms']['max']:.1f})" for x in mine]
        rows.append([_layout(mine[0]), *cells, "yes" if same else "no"])
    return _table([f"{most} GPUs", *(f"{count} tokens" for count in tokens), "one GPU's bits"], rows)


def _of(lines: Sequence[dict[str, Any]], tokens: int, gpus: int) -> list[dict[str, Any]]:
    return [line for line in lines if line["case"]["tokens"] == tokens and line["gpus"] == gpus]


def _median(line: dict[str, Any]) -> float:
    return line["ms"]["median"]


def _layout(line: dict[str, Any]) -> str:
    strategy, *axes = line["case"]["layout"].split()
    shown = [axis for axis in axes if not axis.endswith("1")]
    return f"{strategy}: {' x '.join(shown)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1])
