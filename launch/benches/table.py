"""Markdown tables from the JSON lines of `launch/bench.py`, on standard output.

python launch/benches/table.py docs/benchmarks/2026-11-20-h200.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any


def main(path: str) -> None:
    """Print all tables of the lines in a file."""
    lines = [json.loads(text) for text in Path(path).read_text().splitlines()]
    print("\n\n".join(tables(lines)))


def tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """One table for each kind of lines that is there: steps, ladder, kernels, products and so on."""
    makers = (
        ("steps", best),
        ("steps", every),
        ("ladder", ladder),
        ("ladder", runs),
        ("kernels", kernels),
        ("products", products),
        ("tiles", tiles),
        ("start", start),
        ("numerics", numerics),
        ("exchange", exchange),
        ("scale", scale),
        ("scale", split),
        ("scale", soonest),
        ("scale", ways),
    )
    made = [make([line for line in lines if line["bench"] == kind]) for kind, make in makers if _has(lines, kind)]
    return [text for text in made if text]


def _has(lines: Sequence[dict[str, Any]], kind: str) -> bool:
    return any(line["bench"] == kind for line in lines)


def ladder(lines: Sequence[dict[str, Any]]) -> str:
    """ms a step of each way of computing it, against the ceiling of the same run."""
    rows = []
    for line in lines:
        case, ms = line["case"], line["ms"]
        span, share = f"{ms['min']:.2f} - {ms['max']:.2f}", f"{ms['median'] / line['ceiling_ms']:.3f}"
        cells = [case["model"], str(case["tokens"]), case["way"], f"{ms['median']:.2f}", span, share]
        rows.append([*cells, f"{line['tflops']:.0f}"])
    return _table(["model", "tokens", "way", "ms", "least - most", "x ceiling", "TFLOP/s"], rows)


def runs(lines: Sequence[dict[str, Any]]) -> str:
    """Speed-up over each plain way, for one step and for a whole run of 25 steps.

    Empty if no whole run was timed.
    """
    whole = {_run(line) for line in lines if "run_ms" in line}
    plain = ("plain eager", "plain graph", "plain compiled", "plain compiled + graph")
    rows = []
    for line in (line for line in lines if _run(line) in whole):
        same = {other["case"]["way"]: other for other in lines if _run(other) == _run(line)}
        others = [same.get(way, {}) for way in plain]
        step, run = ([_times(other, line, *key) for other in others] for key in (("ms", "median"), ("run_ms", "mean")))
        cells = [line["case"]["model"], str(line["case"]["tokens"]), line["case"]["way"], f"{_median(line):.2f}"]
        rows.append([*cells, *step, f"{line['run_ms']['mean']:.0f}" if "run_ms" in line else "", *run])
    ratios = [f"x {way.removeprefix('plain ')}" for way in plain]
    head = ["model", "tokens", "way", "ms a step", *ratios, "25 steps, ms", *ratios]
    return _table(head, rows) if rows else ""


def _times(other: dict[str, Any], line: dict[str, Any], key: str, kind: str) -> str:
    return f"{other[key][kind] / line[key][kind]:.2f}" if key in other and key in line else ""


def _run(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["case"]["model"], line["case"]["tokens"], line["ceiling_ms"]


def kernels(lines: Sequence[dict[str, Any]]) -> str:
    """us of each kernel, its share of the copy bandwidth of the same run, and plain torch's us."""
    rows = []
    for line in lines:
        case, us = line["case"], 1e3 * line["ms"]["median"]
        rows.append(
            [
                case["kernel"],
                str(case["rows"]),
                f"{us:.1f}",
                f"{100 * line['share_of_copy']:.0f} %",
                f"{1e3 * line['plain_ms']['median']:.0f}",
            ]
        )
    return _table(["kernel (7B widths)", "rows", "us", "of copy bandwidth", "plain torch, us"], rows)


def start(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds of each part of a process's start, the seconds of the floor without seqpar, and the difference."""
    rows = []
    for line in lines:
        name, whole = f"{line['case']['model']}, {line['case']['tokens']} tokens", line["total"]
        for part, seconds in line["seconds"].items():
            bare = line["floor_seconds"].get(part)
            shown = "" if bare is None else f"{bare:.2f}"
            rows.append([name, part, f"{seconds:.2f}", shown, f"{seconds - (bare or 0):.2f}"])
        bare = line["floor_total"]["median"]
        rows.append(
            [
                name,
                f"total ({whole['min']:.1f} - {whole['max']:.1f})",
                f"{whole['median']:.2f}",
                f"{bare:.2f}",
                f"{whole['median'] - bare:.2f}",
            ]
        )
    return _table(["start", "part", "s", "without us, s", "ours, s"], rows)


def numerics(lines: Sequence[dict[str, Any]]) -> str:
    """Error of a step against full precision on the same inputs: median over the steps (most), and the ratio."""
    rows = []
    for line in lines:
        case, ratio = line["case"], line["ratio"]
        errors = [f"{median(values):.2e} ({max(values):.2e})" for values in line["error"].values()]
        cells = [case["model"], str(case["tokens"]), str(case["steps"]), case["truth"], *errors]
        rows.append([*cells, f"{ratio['median']:.3f} ({ratio['max']:.3f})"])
    ways = lines[0]["error"]
    return _table(["model", "tokens", "steps", "against", *(f"{way} (most)" for way in ways), "ratio (most)"], rows)


def products(lines: Sequence[dict[str, Any]]) -> str:
    """us of a matrix product alone, of a product and a kernel, and of the fastest other way, with its error."""
    rows, told = [], ("product", "rows")
    for at in dict.fromkeys(tuple(line["case"][name] for name in told) for line in lines):
        alone, *ways = (line for line in lines if tuple(line["case"][name] for name in told) == at)
        two, fastest = ways[0], min(ways[1:] or ways, key=_median)
        times = [f"{1e3 * _median(line):.1f}" for line in (alone, two, fastest)]
        rows.append([*map(str, at), *times, f"{fastest['error']:.1e}", fastest["case"]["way"], str(len(ways) - 1)])
    head = ["product", "rows", "alone, us", "+ a kernel", "fastest other", "its error", "which", "of"]
    return _table(head, rows)


def tiles(lines: Sequence[dict[str, Any]]) -> str:
    """The fastest tile of each kernel, width and number of rows, beside today's."""
    rows, told = [], ("kernel", "width", "rows")
    for at in dict.fromkeys(tuple(line["case"][name] for name in told) for line in lines):
        mine = [line for line in lines if tuple(line["case"][name] for name in told) == at]
        fastest, today = min(mine, key=_median), next(line for line in mine if line["case"]["tile"] == "today")
        times = [f"{1e3 * _median(x):.1f} us, {100 * x['share_of_copy']:.0f} %" for x in (today, fastest)]
        rows.append([*map(str, at), *times, fastest["case"]["tile"]])
    return _table(["kernel", "width", "rows", "today, of copy", "fastest, of copy", "tile"], rows)


WHAT = ("model", "tokens", "GPUs")
EXCHANGES = ("ours, collective", "ours, peer", "bare", "with permutes")


def exchange(lines: Sequence[dict[str, Any]]) -> str:
    """us (GB/s a rank) of each way to make an exchange, and the speed-up of peer memory over plain collectives."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in lines:
        case = line["case"]
        found.setdefault((line["gpus"], case["move"], case["mode"], case["mb"]), {})[case["way"]] = line
    rows = []
    for (gpus, *names, size), ways in found.items():
        us = [ways[way]["us"] and ways[way]["us"]["median"] for way in EXCHANGES]
        cells = [
            f"{time:.1f} ({ways[way]['gb_per_s']:.0f})" if time else "-"
            for way, time in zip(EXCHANGES, us, strict=True)
        ]
        ratios = [f"{time / us[1]:.2f}" if time and us[1] else "-" for time in us[2:]]
        rows.append([str(gpus), *names, f"{size:g}", *cells, *ratios])
    return _table(["GPUs", "move", "launch", "MB", *EXCHANGES, "bare / peer", "with permutes / peer"], rows)


def scale(lines: Sequence[dict[str, Any]]) -> str:
    """The fastest layout of one picture on each number of GPUs, beside its ceiling, another engine and one GPU."""
    rows = []
    for _, mine in _by_gpus(lines):
        if not (ours := _fastest(mine, "ours")):
            continue
        ms, peer, one = _median(ours), _fastest(mine, "peer"), _fastest(_alone(lines, ours), "ours")
        ceiling = [line for line in mine if _same_ceiling(line, ours)]
        times = [f"{_median(other) / ms:.2f}" if other else "-" for other in (peer, one)]
        above = f"{ms / _median(ceiling[0]):.3f}" if ceiling else "-"
        memory = f"{ours['gib'] + ours['outside_gib']:.1f}" if "gib" in ours else "-"
        picked = [_median(line) / ms for line in mine if line["ms"] and line.get("picked") and _same_way(line, ours)]
        share = f"{100 * ours['roofline_ms'] / ms:.0f} %"
        cells = [*_what(ours), ours["case"]["way"], _span(ours), above, times[0], peer["case"]["way"] if peer else "-"]
        cells += [times[1], f"{ours['tflops']:.0f}", share, memory, f"{picked[0]:.3f}" if picked else "-"]
        rows.append([*cells, _bits(lines, ours)])
    head = ["fastest layout", "ms (least - most)", "x ceiling", "times faster than", "fastest peer"]
    head += ["times faster than one GPU", "TFLOP/s a GPU", "of roofline", "GiB a GPU", "planner's pick, x fastest"]
    return _table([*WHAT, *head, "one GPU's bits"], rows)


def split(lines: Sequence[dict[str, Any]]) -> str:
    """Time by kind of kernel in a step of the fastest layout on rank 0, SM clock, joules; empty if none was traced."""
    traced = [line for line in lines if "split_ms" in line]
    rows = [
        [
            *_what(line),
            line["case"]["way"],
            *(f"{ms:.2f}" for ms in line["split_ms"].values()),
            _if_there(line, "sm_mhz", 0),
            _if_there(line, "joules", 1),
        ]
        for line in traced
    ]
    kinds = traced[0]["split_ms"] if traced else ()
    return _table([*WHAT, "fastest layout", *kinds, "SM MHz", "J a step"], rows) if rows else ""


def _if_there(line: dict[str, Any], name: str, digits: int) -> str:
    return f"{line[name]:.{digits}f}" if name in line else "-"


def soonest(lines: Sequence[dict[str, Any]]) -> str:
    """The fastest layout for each number of pictures at once: seconds to the first picture, pictures a second."""
    rows = []
    for _, mine in _by_gpus(lines):
        counts = sorted({line["case"]["images"] for line in mine})
        for count in counts if len(counts) > 1 else ():
            if not (line := _fastest(mine, "ours", count)):
                continue
            speed = line["pictures_per_s"]
            cells = [*_what(line), str(count), line["case"]["way"], _span(line)]
            rows.append([*cells, f"{count / speed:.3f}", f"{speed:.3f}", _bits(lines, line)])
    head = ["pictures at once", "fastest layout", "ms a step (least - most)", "s to the first", "pictures a s"]
    return _table([*WHAT, *head, "one GPU's bits"], rows) if rows else ""


def ways(lines: Sequence[dict[str, Any]]) -> str:
    """Every row: our layouts, other engines, ceilings, and the reason where a row was not possible."""
    rows = []
    for line in lines:
        memory = f"{line['gib'] + line['outside_gib']:.1f}" if "gib" in line else "-"
        cells = [
            *_what(line),
            line["case"]["kind"],
            line["case"]["way"],
            _span(line) if line["ms"] else line["refused"],
        ]
        rows.append([*cells, memory, _bits(lines, line)])
    return _table([*WHAT, "kind", "way", "ms (least - most)", "GiB a GPU", "one GPU's bits"], rows)


def _what(line: dict[str, Any]) -> list[str]:
    """The first cells of a row of `scale`; their head is `WHAT`."""
    return [line["case"]["model"], str(line["case"]["tokens"]), str(line["gpus"])]


def _by_gpus(lines: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Lines of the same work, by the number of GPUs."""
    keys = dict.fromkeys((line["case"]["model"], line["case"]["tokens"], line["gpus"]) for line in lines)
    return [
        (key[2], [line for line in lines if (line["case"]["model"], line["case"]["tokens"], line["gpus"]) == key])
        for key in sorted(keys)
    ]


def _alone(lines: Sequence[dict[str, Any]], like: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of the same work on one GPU."""
    names = ("model", "tokens", "dtype", "local")
    return [line for line in lines if line["gpus"] == 1 and all(line["case"][x] == like["case"][x] for x in names)]


def _fastest(lines: Sequence[dict[str, Any]], kind: str, images: int = 1) -> dict[str, Any] | None:
    able = [line for line in lines if (line["case"]["kind"], line["case"]["images"]) == (kind, images) and line["ms"]]
    return min(able, key=_median, default=None)


def _same_way(line: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether both lines use the same transport; the planner picks a layout for each transport."""
    return line["case"].get("transport") == ours["case"]["transport"]


def _same_ceiling(line: dict[str, Any], ours: dict[str, Any]) -> bool:
    case = line["case"]
    return case["kind"] == "ceiling" and case["layout"] == ours["case"]["layout"] and line["ms"] is not None


def _bits(lines: Sequence[dict[str, Any]], line: dict[str, Any]) -> str:
    """Whether the first picture has the bits that one GPU makes; "-" if that is not known."""
    one = [x for x in _alone(lines, line) if "digest" in x and x["digest_steps"] == line.get("digest_steps")]
    return "-" if not one else "yes" if one[0]["digest"] == line["digest"] else "no"


def _span(line: dict[str, Any]) -> str:
    ms = line["ms"]
    return f"{ms['median']:.2f} ({ms['min']:.2f} - {ms['max']:.2f})"


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
