"""Draws README's chart: seconds of denoising on 1, 2 and 4 GPUs, from the result lines of docs/benchmarks.

    python -m docs.tools.speed_chart --write    # docs/pictures/speed-*.svg, for wide and narrow screens, light and dark

A bar is the median time of a call in a committed line times the number of calls in a run; "fp8" is `--precision fp8`
alone. A group has the bars of one kind of GPUs. The figures of other projects (docs/benchmarks/published.jsonl) are
drawn as they published them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from docs.tools.benchmarks_page import FOLDER, eight_bits, lines, newest

PICTURES = FOLDER.parent / "pictures"
PUBLISHED = FOLDER / "published.jsonl"
GPUS = (1, 2, 4)
KINDS = ("peer", "published", "ours", "peer8", "ours8")  # from above


@dataclass(frozen=True)
class Run:
    """A run that the chart shows. calls: of the transformer, each with one branch of guidance."""

    title: str
    what: str
    model: str
    tokens: int
    calls: int
    guided: bool


RUNS = (
    Run("FLUX.1-dev", "1024 x 1024, 50 steps", "flux.1-dev", 4096, 50, False),
    Run("Qwen-Image", "1024 x 1024, 50 guided steps", "qwen-image", 4096, 100, True),
    Run("Wan 2.2 14B", "1280 x 720, 81 frames, 40 guided steps", "wan2.2-14b", 75600, 80, True),
    Run("MiniMax-H3", "1344 x 768, 124 frames, 50 steps", "minimax-h3", 37296, 49, False),  # its 50th step has no call
)


@dataclass(frozen=True)
class Bar:
    """A bar. kind: "ours", "peer" (both in bf16), "ours8", "peer8" (in 8 bits) or "published"."""

    gpus: int
    gpu: str
    name: str
    kind: str
    seconds: float


@cache
def bars(run: Run) -> list[Bar]:
    """Return the bars of a run: the least time of each kind in the newest file that has it.

    In bf16, seqpar and its peer come from one file if any has both: one machine, one day. Where 8 bits were measured on
    other GPUs than these, bf16 of their file is shown beside them.
    """
    shown = list[Bar]()
    for gpus in GPUS:
        files = [list(_of(run, gpus, path)) for path in newest("2*.jsonl")]
        found = list(_published(run, gpus)) + (_first(files, {"ours", "peer"}) or _first(files, {"ours"}))
        cards = {bar.gpu for bar in found if bar.kind == "ours"}
        for kind in ("peer8", "ours8"):
            of_kind = _first(files, {kind})
            found += [bar for bar in of_kind if bar.kind == kind or (bar.kind == "ours" and bar.gpu not in cards)]
        by_kind = sorted(found, key=lambda bar: (bar.gpu, KINDS.index(bar.kind), bar.seconds))
        shown += [next(same) for _, same in groupby(by_kind, key=lambda bar: (bar.gpu, bar.kind))]
    return shown


def _first(files: list[list[Bar]], kinds: set[str]) -> list[Bar]:
    return next((found for found in files if kinds <= {bar.kind for bar in found}), [])


def _of(run: Run, gpus: int, path: Path) -> Iterator[Bar]:
    for line in lines(path):
        case = line["case"]
        pair = "both branches" in case["way"]  # one line for two calls
        of_run = (case["model"], case["tokens"], line["gpus"]) == (run.model, run.tokens, gpus)
        eight = "fp8" in case["way"]
        attention = eight_bits(case).endswith("attention fp8")  # a separate option
        if not of_run or case["kind"] == "ceiling" or attention or (pair and not run.guided):
            continue
        engine = case.get("engine", "").partition(" Ulysses")[0].removeprefix("diffusers + ")
        name = engine or ("seqpar fp8" if eight else "seqpar")
        seconds = line["ms"]["median"] / 1e3 * run.calls / (2 if pair else 1)
        gpu = line["env"]["gpu"].removeprefix("NVIDIA ").split()[0]
        yield Bar(gpus, gpu, name, case["kind"] + ("8" if eight else ""), seconds)


def _published(run: Run, gpus: int) -> Iterator[Bar]:
    for line in map(json.loads, PUBLISHED.read_text(encoding="utf-8").splitlines()):
        if (line["model"], line["gpus"]) == (run.model, gpus):
            yield Bar(gpus, line["gpu"], f"{line['engine']}*", "published", line["denoising_s"])


# Drawing -------------------------------------------------------------------------------------------------------

WIDTH, GAP, ROW, LEFT, LONGEST = 440, 24, 19, 150, 190
COLOURS = {
    "light": {"text": "#20242c", "small": "#555b66", "ours": "#0072b2", "ours8": "#009e73", "peer": "#a3a9b4"},
    "dark": {"text": "#eceef2", "small": "#b4bac6", "ours": "#4aa8e0", "ours8": "#35c496", "peer": "#6d7481"},
}
STYLE = """
text{{font:13px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:{text}}}
.b{{font-weight:600}}.s{{font-size:12px;fill:{small}}}.ours{{fill:{ours}}}.ours8{{fill:{ours8}}}
.peer,.peer8{{fill:{peer}}}.published{{fill:none;stroke:{peer};stroke-dasharray:3 2}}
"""
COLUMNS = {"wide": ((0, 3), (1, 2)), "narrow": ((0, 1, 2, 3),)}


def svg(theme: str, columns: tuple[tuple[int, ...], ...]) -> str:
    """Return the chart. columns: the runs of each column, from left to right."""
    body, heights = list[str](), list[float]()
    for number, runs in enumerate(columns):
        y = 0.0
        for run in runs:
            panel, y = _panel(RUNS[run], number * (WIDTH + GAP), y)
            body += panel
        heights.append(y)
    width, height = len(columns) * (WIDTH + GAP) - GAP, max(heights)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" role="img">'
    title = "<title>Seconds of denoising of four models on 1, 2 and 4 GPUs</title>"
    return "\n".join((head, title, f"<style>{STYLE.format(**COLOURS[theme])}</style>", *body, "</svg>")) + "\n"


def _panel(run: Run, x: float, y: float) -> tuple[list[str], float]:
    """Draw the bars of a run, on the scale of the longest, and return where the panel ends."""
    found = bars(run)
    longest, group = max(bar.seconds for bar in found), ""
    drawn = [_text(x, y + 18, run.title, "b"), _text(x, y + 34, f"{run.what}: seconds of denoising", "s")]
    y += 42
    for bar in found:
        if group != (group := f"{bar.gpus} {bar.gpu}{'s' if bar.gpus > 1 else ''}"):
            y += 4
            drawn.append(_text(x, y + 13, group, "s"))
        length = LONGEST * bar.seconds / longest
        seconds = f"{bar.seconds:.{0 if bar.seconds >= 100 else 1}f}"
        drawn.append(_text(x + 54, y + 13, bar.name, "b" if bar.kind.startswith("ours") else ""))
        place = f'x="{x + LEFT:g}" y="{y + 3:g}" width="{length:.1f}" height="{ROW - 6}"'
        drawn.append(f'<rect class="{bar.kind}" {place} rx="2"/>')
        drawn.append(_text(x + LEFT + length + 6, y + 13, seconds, ""))
        y += ROW
    return drawn, y + 10


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.4g}" y="{y:g}">{text}</text>'


def pictures() -> dict[str, str]:
    return {f"speed-{shape}-{theme}": svg(theme, COLUMNS[shape]) for shape in COLUMNS for theme in COLOURS}


if __name__ == "__main__":
    for name, text in pictures().items():
        if "--write" in sys.argv:
            (PICTURES / f"{name}.svg").write_text(text, encoding="utf-8")
        print(name, len(text))
