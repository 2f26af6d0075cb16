"""Plots from the JSON lines of `launch/bench.py`: ms a step over GPUs beside the ceiling and other engines, exchanges
beside the bandwidth of the links, memory and time of a long-lived process. Lines of other benches have no plot.

python launch/benches/plot.py docs/benchmarks/2026-11-21-2xh200.jsonl        # writes .png files beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Line = dict[str, Any]
LINKS = 478.0  # GB/s of an H200 to others in each direction: 18 links of 26.6
INK, OURS, THEIRS = "#333333", "#2f7d4f", "#9aa5b1"


def main(path: Path) -> None:
    """Write one plot for each kind of lines in a file, beside the file."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for kind, draw in PLOTS.items():
        if mine := [line for line in lines if line["bench"] == kind]:
            target = path.with_name(f"{path.stem}-{kind}.png")
            figure = draw(mine)
            figure.savefig(target, dpi=120, bbox_inches="tight")
            plt.close(figure)
            print(target)


def soak(lines: Sequence[Line]) -> Any:
    """Two panels for each part of a soak: memory after each picture, and the seconds that each picture took."""
    order = ("mixed", "sizes", "calls native", "calls fused", "calls generic")
    parts = [part for part in order if any(line["part"] == part for line in lines)]
    figure, panels = plt.subplots(2, max(1, len(parts)), figsize=(5.5 * max(1, len(parts)), 5), squeeze=False)
    for part, (memory, time) in zip(parts, panels.T, strict=False):
        mine = [line for line in lines if line["part"] == part]
        kinds = {"used": "device, all of it", "allocated": "device, tensors", "host": "host"}
        for (key, name), color in zip(kinds.items(), (OURS, INK, THEIRS), strict=True):
            if any(line.get(key) for line in mine):
                memory.plot([line[key] / 2**30 for line in mine], color=color, label=name)
        noun = "sets of calls" if part.startswith("calls") else "pictures"
        memory.set(title=f"{part}: {len(mine)} {noun}, {len({line['kind'] for line in mine})} kinds", ylabel="GiB")
        memory.set_ylim(bottom=0)
        for first, color in ((True, THEIRS), (False, OURS)):
            found = [(line["picture"], line["seconds"]) for line in mine if (line["time"] == 1) == first]
            at, seconds = zip(*found, strict=True) if found else ((), ())
            time.scatter(at, seconds, color=color, s=9, label="first of a kind" if first else "later ones of a kind")
        time.set(xlabel=noun, ylabel="s", yscale="log")
    panels[0, 0].legend(frameon=False)
    panels[1, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def steps(lines: Sequence[Line]) -> Any:
    """ms a step over GPUs, a panel for each model and token count: ours, the best other engine, the ceiling."""
    able = [point for line in lines if line["ms"] and line["case"].get("images", 1) == 1 for point in _points(line)]
    works = list(dict.fromkeys(work for work, *_ in able))
    figure, panels = plt.subplots(1, len(works), figsize=(4 * len(works), 3.2), squeeze=False)
    kinds = {
        "ours": {"color": OURS, "marker": "o", "label": "fastest layout"},
        "peer": {"color": THEIRS, "marker": "s", "label": "fastest peer"},
        "ceiling": {"color": INK, "linestyle": "--", "marker": "_", "label": "ceiling"},
    }
    for panel, work in zip(panels[0], works, strict=True):
        mine = [rest for its, *rest in able if its == work]
        for kind, style in kinds.items():
            points = [(gpus, ms) for its, gpus, ms in mine if its == kind]
            least = sorted((n, min(ms for gpus, ms in points if gpus == n)) for n in {gpus for gpus, _ in points})
            if kind == "ours":
                panel.scatter(*zip(*points, strict=True), color=THEIRS, s=10)
            if least:
                panel.plot(*zip(*least, strict=True), linewidth=1.2, **style)
        counts = sorted({gpus for _, gpus, _ in mine})
        panel.set(title=f"{work[0]}, {work[1]} tokens", xlabel="GPUs", ylabel="ms a step", xticks=counts)
        panel.set_ylim(bottom=0)
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def _points(line: Line) -> list[tuple[tuple[str, int], str, int, float]]:
    """Return (work, kind, GPUs, ms) of a row, and of the ceiling that it was timed in turn with."""
    case = line["case"]
    work, ms = (case["model"], case["tokens"]), line["ms"]["median"]
    ceiling = [(work, "ceiling", line["gpus"], line["reference_ms"]["median"])] if "reference_ms" in line else []
    return [(work, case.get("kind", "ours"), line["gpus"], ms), *ceiling]


def exchange(lines: Sequence[Line]) -> Any:
    """GB/s a rank over MB, a panel for each move and number of GPUs; times in CUDA graphs if there are any."""
    points = [point for line in lines for point in _rates(line)]
    mode = "graph" if any(point[0] == "graph" for point in points) else "eager"
    panes = list(dict.fromkeys(pane for its, pane, *_ in points if its == mode))
    figure, panels = plt.subplots(1, len(panes), figsize=(4.5 * len(panes), 3.4), squeeze=False, sharey=True)
    for panel, pane in zip(panels[0], panes, strict=True):
        here = [(way, mb, rate) for its, at, way, mb, rate in points if (its, at) == (mode, pane)]
        for way in dict.fromkeys(way for way, *_ in here):
            curve = sorted({(mb, rate) for its, mb, rate in here if its == way})
            style = {"color": OURS if way.startswith("ours") else THEIRS, "marker": "o", "markersize": 4}
            line = "-" if way in ("ours, peer", "bare") else "--"
            panel.plot(*zip(*curve, strict=True), label=way, linestyle=line, **style)
        panel.axhline(LINKS, color=INK, linewidth=1, linestyle=":")
        panel.set(title=f"{pane[1]}, {pane[0]} GPUs, {mode} (dotted: links)", xlabel="MB a rank", xscale="log")
    panels[0, 0].set_ylabel("GB/s a rank")
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def _rates(line: Line) -> list[tuple[str, tuple[int, str], str, float, float]]:
    """Return (mode, (GPUs, move), way, MB, GB/s between ranks) of a row, and of the collective beside it."""
    case, gpus = line["case"], line["gpus"]
    pane = gpus, case["move"]
    if "us" in line:  # lines of an older bench name the mode
        return [(case["mode"], pane, case["way"], case["mb"], line["gb_per_s"])] if line["us"] else []
    ways = {f"ours, {case['transport']}": line["ms"], "bare": line.get("reference_ms")}
    nbytes = case["bytes"] * (gpus - 1) / gpus  # the rest stays on the rank
    return [("graph", pane, way, case["mb"], nbytes / ms["median"] / 1e6) for way, ms in ways.items() if ms]


PLOTS = {"steps": steps, "scale": steps, "calls": steps, "exchange": exchange, "soak": soak}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
