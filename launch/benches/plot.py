"""Plots from the JSON lines of `launch/bench.py`: the ladder as bars beside its ceiling, ms a step over GPUs, the parts
of a process's start, errors of steps, exchanges beside the bandwidth of the links, scaling beside its ceiling, memory
and time of a long-lived process.

python launch/benches/plot.py docs/benchmarks/2026-11-20-h200-engine.jsonl        # writes .png files beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Line = dict[str, Any]
INK, OURS, THEIRS = "#333333", "#2f7d4f", "#9aa5b1"


def main(path: Path) -> None:
    """Write one plot for each kind of lines in the file, beside the file."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for kind, draw in (
        ("ladder", ladder),
        ("steps", steps),
        ("start", start),
        ("numerics", numerics),
        ("exchange", exchange),
        ("scale", scale),
        ("soak", soak),
    ):
        if mine := [line for line in lines if line["bench"] == kind]:
            target = path.with_name(f"{path.stem}-{kind}.png")
            figure = draw(mine)
            figure.savefig(target, dpi=120, bbox_inches="tight")
            print(target)


def soak(lines: Sequence[Line]) -> Any:
    """Two panels for each part of a soak: memory after each picture, and the seconds that each picture took."""
    order = ("mixed", "sizes", "calls native", "calls generic")
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


def ladder(lines: Sequence[Line]) -> Any:
    """A panel for each run of a model and token count: ms of each way as bars, the run's ceiling as a line."""
    runs = [
        list(run)
        for _, run in groupby(
            lines, key=lambda line: (line["case"]["model"], line["case"]["tokens"], line["ceiling_ms"])
        )
    ]
    height = 0.8 * len(runs) + 0.22 * len(lines)
    figure, panels = plt.subplots(len(runs), 1, figsize=(9, height), squeeze=False)
    for panel, run in zip(panels[:, 0], runs, strict=True):
        ways = [line for line in run if line["case"]["way"] != "ceiling"]
        ways.sort(key=lambda line: line["ms"]["median"])
        names, ms = [line["case"]["way"] for line in ways], [line["ms"]["median"] for line in ways]
        bars = panel.barh(names, ms, color=[OURS if name.startswith("engine") else THEIRS for name in names])
        panel.bar_label(bars, [f" {value:.2f} ms, {value / run[0]['ceiling_ms']:.2f} x" for value in ms], color=INK)
        panel.axvline(run[0]["ceiling_ms"], color=INK, linewidth=1, linestyle="--")
        panel.set_xlim(0, 1.3 * max(ms))
        panel.invert_yaxis()
        panel.set_title(f"{run[0]['case']['model']}, {run[0]['case']['tokens']} tokens (dashed: ceiling)", loc="left")
    figure.tight_layout()
    return figure


def steps(lines: Sequence[Line]) -> Any:
    """ms a step over GPUs, a panel for each token count; each layout is a point, a line joins the fastest."""
    tokens = sorted({line["case"]["tokens"] for line in lines})
    figure, panels = plt.subplots(1, len(tokens), figsize=(4 * len(tokens), 3.2), squeeze=False)
    for panel, count in zip(panels[0], tokens, strict=True):
        mine = [line for line in lines if line["case"]["tokens"] == count]
        gpus = sorted({line["gpus"] for line in mine})
        best = [min(line["ms"]["median"] for line in mine if line["gpus"] == n) for n in gpus]
        panel.scatter([line["gpus"] for line in mine], [line["ms"]["median"] for line in mine], color=THEIRS, s=18)
        panel.plot(gpus, best, color=OURS, marker="o", label="fastest layout")
        panel.plot(gpus, [best[0] * gpus[0] / n for n in gpus], color=INK, linewidth=1, linestyle="--", label="perfect")
        panel.set(title=f"{mine[0]['case']['model']}, {count} tokens", xlabel="GPUs", ylabel="ms a step", xticks=gpus)
        panel.set_ylim(bottom=0)
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def start(lines: Sequence[Line]) -> Any:
    """Two stacked bars for each line: ours to the first picture, and the floor without seqpar."""
    parts = list(dict.fromkeys(part for line in lines for part in line["seconds"]))
    figure, panel = plt.subplots(figsize=(9, 1.2 + 0.9 * len(lines)))
    for index, line in enumerate(lines):
        for key, y, name in (("", 2.5 * index, "first picture"), ("floor_", 2.5 * index + 1, "without us")):
            seconds, left = line[f"{key}seconds"], 0.0
            for part in (part for part in parts if part in seconds):
                panel.barh(
                    y,
                    seconds[part],
                    left=left,
                    color=plt.get_cmap("tab20")(parts.index(part)),
                    label=part if not index and not key else None,
                )
                left += seconds[part]
            panel.text(left, y, f" {line['case']['model']}, {name}: {left:.1f} s", va="center", color=INK)
    panel.set(xlabel="seconds", yticks=[], xlim=(0, 1.6 * max(line["total"]["max"] for line in lines)))
    panel.invert_yaxis()
    panel.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure


def numerics(lines: Sequence[Line]) -> Any:
    """Error of each step on the same inputs, a panel for each model: the engine beside plain bf16."""
    figure, panels = plt.subplots(1, len(lines), figsize=(4.5 * len(lines), 3.2), squeeze=False)
    for panel, line in zip(panels[0], lines, strict=True):
        for (way, errors), color in zip(line["error"].items(), (OURS, THEIRS), strict=True):
            panel.plot(range(1, len(errors) + 1), errors, color=color, marker="o", markersize=3, label=way)
        title = f"{line['case']['model']}: ratio {line['ratio']['median']:.2f} (most {line['ratio']['max']:.2f})"
        panel.set(title=title, xlabel="step", ylabel="relative error", yscale="log")
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def scale(lines: Sequence[Line]) -> Any:
    """ms a step over GPUs, a panel for each model and token count: ours, the best other engine, the ceiling."""
    able = [line for line in lines if line["ms"] is not None and line["case"]["images"] == 1]
    works = list(dict.fromkeys((line["case"]["model"], line["case"]["tokens"]) for line in able))
    figure, panels = plt.subplots(1, len(works), figsize=(4 * len(works), 3.2), squeeze=False)
    kinds = {
        "ours": {"color": OURS, "marker": "o", "label": "fastest layout"},
        "peer": {"color": THEIRS, "marker": "s", "label": "fastest peer"},
        "ceiling": {"color": INK, "linestyle": "--", "marker": "_", "label": "ceiling"},
    }
    for panel, work in zip(panels[0], works, strict=True):
        mine = [line for line in able if (line["case"]["model"], line["case"]["tokens"]) == work]
        for kind, style in kinds.items():
            points = [(line["gpus"], line["ms"]["median"]) for line in mine if line["case"]["kind"] == kind]
            least = sorted((n, min(ms for gpus, ms in points if gpus == n)) for n in {gpus for gpus, _ in points})
            if kind == "ours":
                panel.scatter(*zip(*points, strict=True), color=THEIRS, s=10)
            if least:
                panel.plot(*zip(*least, strict=True), linewidth=1.2, **style)
        gpus = sorted({line["gpus"] for line in mine})
        panel.set(title=f"{work[0]}, {work[1]} tokens", xlabel="GPUs", ylabel="ms a step", xticks=gpus)
        panel.set_ylim(bottom=0)
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


def exchange(lines: Sequence[Line]) -> Any:
    """GB/s a rank over MB, a panel for each move and number of GPUs; times in CUDA graphs if there are any."""
    mode = "graph" if any(line["case"]["mode"] == "graph" for line in lines) else "eager"
    mine = [line for line in lines if line["us"] is not None and line["case"]["mode"] == mode]
    panes = list(dict.fromkeys((line["gpus"], line["case"]["move"]) for line in mine))
    figure, panels = plt.subplots(1, len(panes), figsize=(4.5 * len(panes), 3.4), squeeze=False, sharey=True)
    for panel, (gpus, move) in zip(panels[0], panes, strict=True):
        here = [line for line in mine if (line["gpus"], line["case"]["move"]) == (gpus, move)]
        for way in dict.fromkeys(line["case"]["way"] for line in here):
            points = [(line["case"]["mb"], line["gb_per_s"]) for line in here if line["case"]["way"] == way]
            style = {"color": OURS if way.startswith("ours") else THEIRS, "marker": "o", "markersize": 4}
            panel.plot(
                *zip(*points, strict=True), label=way, **style, linestyle="-" if way in ("ours, peer", "bare") else "--"
            )
        links = here[0]["gb_per_s"] / here[0]["share_of_links"]
        panel.axhline(links, color=INK, linewidth=1, linestyle=":")
        panel.set(title=f"{move}, {gpus} GPUs, {mode} (dotted: links)", xlabel="MB a rank", xscale="log")
    panels[0, 0].set_ylabel("GB/s a rank")
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
