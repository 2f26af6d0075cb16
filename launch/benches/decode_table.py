"""Markdown tables from the JSON lines of `launch/bench.py decode`.

python launch/benches/decode_table.py docs/benchmarks/2026-11-22-h200-decoder.jsonl    # also into the page beside it

In the page (.md) of the same name, what stands between the lines `<!-- tables -->` and `<!-- end of tables -->` is
replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

EAGER, GRAPH, TILING = "diffusers, eager", "diffusers, graph", "diffusers, tiling"
EXCHANGES = ("halo", "statistics", "collectives")  # kinds of kernels
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"
Line = dict[str, Any]


def main(path: Path) -> None:
    """Print all tables, and write them into the page, if there is one with their place."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    made = "\n\n".join(tables([line for line in lines if line["bench"] == "decode"]))
    print(made)
    page = path.with_suffix(".md")
    if page.exists() and BEGIN in (text := page.read_text()):
        page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{made}\n\n{END}", text, flags=re.DOTALL))


def tables(lines: Sequence[Line]) -> list[str]:
    """Return the table of the fastest rows, the table of all rows, and where their time goes."""
    return [made for make in (best, every, split, refused) if (made := make(lines))]


def best(lines: Sequence[Line]) -> str:
    """Our fastest row of each work on each number of GPUs, against diffusers on one GPU in the same run."""
    head = ["work", "GPUs", "ours, ms", "x diffusers", "x its graph", "x its tiling", "GiB", "x diffusers' GiB"]
    rows, done = [], [line for line in lines if line["ms"]]
    for what, ranks in dict.fromkeys((line["case"]["what"], line["ranks"]) for line in done):
        same = {line["case"]["way"]: line for line in done if (line["case"]["what"], line["ranks"]) == (what, ranks)}
        ours = [line for way, line in same.items() if way.startswith("ours")]
        if not ours:
            continue
        line = min(ours, key=_median)
        times = [f"{_median(same[way]) / _median(line):.2f}" if way in same else "" for way in (EAGER, GRAPH, TILING)]
        rows.append([what, str(ranks), f"{_median(line):.1f}", *times, _gib(line), _memory(line)])
    return _table(head, rows)


def every(lines: Sequence[Line]) -> str:
    """All rows: ms, memory beside weights, error against fp32 and difference to diffusers' eager row."""
    head = ["work", "run of", "row", "ms", "least - most", "predicted", "GiB", "predicted", "reserved", "x GiB"]
    head += ["error", "x one GPU's", "at most", "difference"]
    rows = []
    for line in (line for line in lines if line["ms"]):
        ms, case = line["ms"], line["case"]
        reserved = f"{line['reserved_gib']:.1f}" if "reserved_gib" in line else ""
        cells = [case["what"], str(line["ranks"]), case["way"], f"{ms['median']:.1f}"]
        ahead = line.get("predicted", {})
        cells += [f"{ms['min']:.1f} - {ms['max']:.1f}", _short(ahead, "ms", ".0f"), _gib(line)]
        cells += [_short(ahead, "gib", ".2f"), reserved, _memory(line)]
        error, apart = line.get("error", {}), line.get("difference", {})
        ratio = f"{error['x_one_gpu']:.2f}" if "x_one_gpu" in error else ""
        rows.append([*cells, _short(error, "relative"), ratio, _short(error, "max"), _short(apart, "relative")])
    return _table(head, rows)


def split(lines: Sequence[Line]) -> str:
    """Where the time goes, in percent of a traced decoding on rank 0; of exchanges what nothing hides."""
    traced = [line for line in lines if line.get("split_ms")]
    kinds = list(dict.fromkeys(kind for line in traced for kind in line["split_ms"]))
    rows = []
    for line in traced:
        parts = line["split_ms"]
        shares = [f"{100 * parts.get(kind, 0) / sum(parts.values()):.1f}" for kind in kinds]
        rows.append([line["case"]["what"], line["case"]["way"], f"{sum(parts.values()):.1f}", *shares])
    return _table(["work", "row", "ms, traced", *(f"{kind}, %" for kind in kinds)], rows)


def refused(lines: Sequence[Line]) -> str:
    """Rows that were not possible, with their reasons."""
    rows = [
        [line["case"]["what"], str(line["ranks"]), line["case"]["way"], line["refused"].replace("|", "/")]
        for line in lines
        if line["ms"] is None
    ]
    return _table(["work", "run of", "row", "not possible"], rows)


def shown(line: Line) -> str:
    """Return one line of the table that the bench prints."""
    start, ms = f"{line['case']['what']:<26} {line['case']['way']:<36}", line["ms"]
    if ms is None:
        return f"{start} {line['refused']}"
    told = f"{start} {ms['median']:9.2f} ms ({ms['min']:.2f} - {ms['max']:.2f})"
    if EAGER in line["times"]:
        told += f"  {line['times'][EAGER]:5.2f} x"
    if "gib" in line:
        told += f"  {line['gib']:6.2f} GiB + {line['outside_gib']:.2f}, reserved {line['reserved_gib']:.1f}"
    told += f" ({line['memory']:.2f} x)" if "memory" in line else ""
    if "predicted" in line:
        told += f" [predicted {line['predicted']['ms']:.4g} ms, {line['predicted']['gib']:.3g} GiB]"
    for name in ("error", "difference"):
        if name in line:
            told += f"  {name} {line[name]['relative']:.2e}, at most {line[name]['max']:.1e}"
            told += f" ({line[name]['x_one_gpu']:.2f} x)" if "x_one_gpu" in line[name] else ""
    for kind in (*EXCHANGES, "attention", "norm"):
        if kind in line.get("split_ms", {}):
            told += f"  {kind} {100 * line['split_ms'][kind] / sum(line['split_ms'].values()):.1f} %"
    return told


def _median(line: Line) -> float:
    return line["ms"]["median"]


def _gib(line: Line) -> str:
    return f"{line['gib'] + line['outside_gib']:.2f}" if "gib" in line else ""


def _memory(line: Line) -> str:
    return f"{line['memory']:.2f}" if "memory" in line else ""


def _short(found: Mapping[str, float], key: str, form: str = ".1e") -> str:
    return format(found[key], form) if key in found else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [*rows]
    body = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    return body if rows else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
