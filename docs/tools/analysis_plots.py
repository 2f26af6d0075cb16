"""The two plots of docs/analysis.md: attention's share of a step against tokens, and ms per step against GPUs.

Curves are the planner's predictions by the defaults of an H200; points are lines of docs/benchmarks.

    python -m docs.tools.analysis_plots        # writes docs/analysis-share.png and docs/analysis-gpus.png
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from docs.tools.analysis import pipeline_parallel, tensor_parallel
from seqpar.cli.args import Args
from seqpar.cli.job import check
from seqpar.mesh.mesh import Mesh
from seqpar.planner.costs import parts
from seqpar.planner.predict import Load, predict
from seqpar.planner.rates import H200
from seqpar.planner.search import Preferences, search
from seqpar.types.facts import Layout, Work

ROOT = Path(__file__).parents[2]
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
INK, OURS, THEIRS, RED = "#333333", "#2f7d4f", "#9aa5b1", "#c8553d"
# the model's flags, and the files with its lines: a step of one picture, with guidance where the model has two branches
MODELS = {
    "large-dit-7b": {"classes": ("1",), "size": "1024"},
    "dit-xl/2": {"classes": ("1",), "size": "1024"},
    "flux.1-dev": {"model": "random:FLUX.1-dev", "prompt": ("a lighthouse",)},
}
SHARES = ("2026-11-20-h200-sustained", "2026-11-21-2xh200", "2026-11-22-h200-flux")
TIMES = ("2026-11-20-h200-engine", "2026-11-21-2xh200", "2026-11-21-4xh200", "2026-11-22-h200-flux")
PANELS = (("large-dit-7b", 256), ("large-dit-7b", 4096), ("dit-xl/2", 4096), ("flux.1-dev", 4096))
GPUS: tuple[int, ...] = (1, 2, 4, 8)
TOKENS = tuple(64 * 2 ** (step / 2) for step in range(23))


@dataclass(frozen=True)
class Point:
    """A measurement: attention's share of the time of a step, or ms per step; and the file whose line it is."""

    model: str
    tokens: int
    gpus: int
    value: float
    file: str


@cache
def run_of(model: str) -> tuple[Work, Load]:
    """Return the work of a model and the load of one picture, as `seqpar plan` has them."""
    settings: Any = {"model": model, **MODELS[model]}
    job = check(Args(dry_run=(1,), **settings), Mesh.single())
    return job.work, job.load


def _lines(names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        for text in (ROOT / "docs" / "benchmarks" / f"{name}.jsonl").read_text().splitlines():
            yield f"{name}.jsonl", json.loads(text)


def _is_ours(line: dict[str, Any]) -> bool:
    case = line.get("case")
    if not isinstance(case, dict) or case.get("model") not in MODELS or case.get("images", 1) != 1:
        return False
    ways = ("generic", "adapter", "both branches", "call with modulation", "ceiling", "two kernels")
    return case.get("kind", "ours") == "ours" and not any(word in case.get("way", "") for word in ways)


def measured_shares() -> tuple[Point, ...]:
    """Return attention's share of the kernels' time on one GPU, or on one GPU a branch of guidance."""
    found = []
    for file, line in _lines(SHARES):
        split = line.get("split_ms")
        case = line.get("case", {})
        alone = line.get("gpus") == 1 or case.get("layout") == "ulysses cfg2 ring1 ulysses1"
        if isinstance(split, dict) and _is_ours(line) and alone:
            share = split["attention"] / sum(split.values())
            found.append(Point(case["model"], case["tokens"], line["gpus"], share, file))
    return tuple(found)


def measured_times() -> tuple[Point, ...]:
    least: dict[tuple[str, int, int], Point] = {}
    for file, line in _lines(TIMES):
        if line.get("bench") not in ("steps", "scale", "calls") or not line.get("ms") or not _is_ours(line):
            continue
        case = line["case"]
        point = Point(case["model"], case["tokens"], line["gpus"], line["ms"]["median"], file)
        key = point.model, point.tokens, point.gpus
        if key[:2] in PANELS and (key not in least or point.value < least[key].value):
            least[key] = point
    return tuple(least[key] for key in sorted(least))


def shares(model: str) -> dict[str, list[float]]:
    """Return attention's share of a step's FLOPs, and of its predicted time on one GPU, at each of `TOKENS`."""
    work, load = run_of(model)
    alone, curves = Layout(1, 1, 1, 1, "ulysses", "peer"), {"flops": list[float](), "time": list[float]()}
    for tokens in map(round, TOKENS):
        cost = parts(work, 1 + load.guidance, tokens, load.others)
        row = predict(work, replace(load, tokens=tokens), alone, H200)
        curves["flops"].append(cost["attention"].flops / sum(part.flops for part in cost.values()))
        curves["time"].append(row.attention / row.ms)
    return curves


def times(model: str, tokens: int) -> dict[str, list[float]]:
    """Return the predicted ms of a step on each of `GPUS`: planned, by tensor parallelism, and by pipeline stages."""
    work, load = run_of(model)
    load = replace(load, tokens=tokens)
    return {
        "planned": [search(work, load, n, Preferences(), H200, "peer", None).ranked[0].ms for n in GPUS],
        "tensor": [tensor_parallel(work, load, n, H200, "peer").ms for n in GPUS],
        "pipeline": [pipeline_parallel(work, load, n, H200, "peer").ms for n in GPUS],
    }


def digest() -> str:
    """Return a hash of everything that the plots show, to four digits; the plots hold it in their metadata."""
    curves = [[*shares(model).values()] for model in MODELS] + [[*times(*panel).values()] for panel in PANELS]
    points = [(x.model, x.tokens, x.gpus, f"{x.value:.4g}", x.file) for x in (*measured_shares(), *measured_times())]
    numbers = [[[f"{y:.4g}" for y in curve] for curve in panel] for panel in curves]
    return hashlib.sha256(json.dumps([numbers, points]).encode()).hexdigest()[:16]


def draw_shares() -> Any:
    """A panel for each model: the share by FLOPs and by time, with measured shares."""
    figure, panels = plt.subplots(1, len(MODELS), figsize=(11, 3.1), sharey=True)
    for panel, model in zip(panels, MODELS, strict=True):
        curves = shares(model)
        panel.plot(TOKENS, curves["flops"], color=THEIRS, linestyle="--", label="of FLOPs")
        panel.plot(TOKENS, curves["time"], color=OURS, label="of time, predicted")
        points = [(x.tokens, x.value) for x in measured_shares() if x.model == model]
        panel.scatter(*zip(*points, strict=True), color=INK, s=22, zorder=3, label="of time, measured")
        panel.axhline(0.5, color=INK, linewidth=0.6, linestyle=":")
        panel.set(title=model, xlabel="tokens", xscale="log", ylim=(0, 1))
        panel.set_xticks([256, 1024, 4096, 16384, 65536], ["256", "1k", "4k", "16k", "64k"])
        panel.minorticks_off()
    panels[0].set_ylabel("attention's share of a step")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def draw_times() -> Any:
    """A panel for each work: ms per step planned, by tensor and by pipeline parallelism, with the fastest measured."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 3.1))
    styles = {
        "planned": {"color": OURS, "label": "planned, predicted"},
        "tensor": {"color": RED, "linestyle": "--", "label": "tensor, predicted"},
        "pipeline": {"color": THEIRS, "linestyle": "--", "label": "pipeline, predicted"},
    }
    for panel, (model, tokens) in zip(panels, PANELS, strict=True):
        for kind, curve in times(model, tokens).items():
            panel.plot(GPUS, curve, **styles[kind])
        points = [(x.gpus, x.value) for x in measured_times() if (x.model, x.tokens) == (model, tokens)]
        panel.scatter(*zip(*points, strict=True), color=INK, s=22, zorder=3, label="fastest measured")
        panel.set(title=f"{model}, {tokens} tokens", xlabel="H200s", xscale="log")
        panel.set_xticks(GPUS, [str(n) for n in GPUS])
        panel.minorticks_off()
        panel.set_ylim(bottom=0, top=1.1 * panel.get_ylim()[1])
    panels[0].set_ylabel("ms per step")
    panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure


def main() -> None:
    for name, draw in {"share": draw_shares, "gpus": draw_times}.items():
        target = ROOT / "docs" / f"analysis-{name}.png"
        with matplotlib.rc_context(STYLE):
            save(draw(), target)
        print(target)


def save(figure: Any, target: Path) -> None:
    """Write a figure as a PNG of few colours, a third as large, whose metadata holds `digest`."""
    with io.BytesIO() as drawn:
        figure.savefig(drawn, dpi=100)
        plt.close(figure)
        note = PngInfo()
        note.add_text("digest", digest())
        Image.open(drawn).convert("RGB").quantize(32).save(target, pnginfo=note, optimize=True)


if __name__ == "__main__":
    main()
