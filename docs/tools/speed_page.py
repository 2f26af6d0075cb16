"""Writes the tables of docs/speed.md: ms per call on 1 to 8 GPUs, measured and predicted by the planner.

python -m docs.tools.speed_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date, timedelta
from functools import cache

from docs.tools.benchmarks_page import FOLDER, Row, eight_bits, newest, rows
from launch.baselines.released import RELEASED, Released
from seqpar.families._find import WORK
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.rates import H200
from seqpar.planner.search import Preferences, search

PAGE = FOLDER.parent / "speed.md"
BEGIN, END = "<!-- table: python -m docs.tools.speed_page --write -->\n", "<!-- end of table -->"
GPUS = (1, 2, 3, 4, 6, 8)
ATTENTION = "fp8, attention fp8"
SAME = timedelta(1)  # between cells of a row without a date
# model -> its title; calls have the sizes of the benches (launch/baselines/released.py)
TITLES = {
    "flux.1-dev": "FLUX.1-dev, 1024 x 1024",
    "flux.2-dev": "FLUX.2-dev, 1024 x 1024",
    "qwen-image": "Qwen-Image, 1024 x 1024",
    "z-image": "Z-Image, 1024 x 1024",
    "krea-2": "Krea 2, 1024 x 1024",
    "sd3.5-large": "Stable Diffusion 3.5 large, 1024 x 1024",
    "wan2.1-14b": "Wan 2.1 14B, 832 x 480, 81 frames",
    "wan2.2-14b": "Wan 2.2 14B, 1280 x 720, 81 frames",
    "wan2.2-ti2v-5b": "Wan 2.2 5B, 1280 x 704, 121 frames",
    "hunyuan-video": "HunyuanVideo, 960 x 544, 129 frames",
    "hunyuan-video-1.5": "HunyuanVideo 1.5, 848 x 480, 121 frames",
    "ltx-2": "LTX-2, 768 x 512, 121 frames",
    "minimax-h3": "MiniMax-H3, 1344 x 768, 124 frames",
}
HEAD = f"| model, size | precision | {' | '.join(map(str, GPUS))} |\n| --- | --- |{' --- |' * len(GPUS)}\n"


def measured(model: str, gpus: int, precision: str) -> Row | None:
    """Return the newest line of one branch of guidance on these GPUs."""
    for found in all_rows():
        for row in found.get(model, ()):
            case = row.ours["case"]
            whole = "both branches" not in row.work and case["tokens"] == RELEASED[model].tokens
            if row.gpus == gpus and (eight_bits(case).removeprefix(", ") or "bf16") == precision and whole:
                return row
    return None


@cache
def all_rows() -> list[dict[str, list[Row]]]:
    return [rows(path) for path in newest("2*.jsonl")]


def predicted(model: Released, gpus: int, precision: str) -> float:
    """Return the ms of a call with the fastest layout that `seqpar plan` would take on H200s with NVLink."""
    work = WORK[model.theirs](model.config, text=model.text)
    latent = int(model.config.get("in_channels") or 16)
    load = Load(1, model.tokens, False, 1, 2, 0, latent, 2, TABLE_BYTES, model.others, eight=precision == "fp8")
    return search(work, load, gpus, Preferences(), H200, "peer", None).ranked[0].ms


def table() -> str:
    return HEAD + "".join(_rows()) + "\n" + _differences()


def _differences() -> str:
    """Say how far predictions are from measurements on H200s."""
    ratios = list[float]()
    for name in TITLES:
        for precision in ("bf16", "fp8"):
            found = [row for gpus in GPUS if (row := measured(name, gpus, precision)) and row.gpu == "H200"]
            ratios += [predicted(RELEASED[name], x.gpus, precision) / x.ours["ms"]["median"] - 1 for x in found]
    low, high = f"{-min(ratios):.0%}", f"{max(ratios):.0%}"
    return f"Where both exist, the prediction is from {low} below the measurement to {high} above it.\n"


def _rows() -> Iterator[str]:
    for name, title in TITLES.items():
        for precision in ("bf16", "fp8", ATTENTION):
            found = [measured(name, gpus, precision) for gpus in GPUS]
            if precision == ATTENTION and not any(found):
                continue
            newest_day = max((_day(row) for row in found if row), default=None)
            cells = list[str]()
            for gpus, row in zip(GPUS, found, strict=True):
                guess = "" if precision == ATTENTION else f"~{_ms(predicted(RELEASED[name], gpus, precision))}"
                card = "" if row is None or row.gpu == "H200" else f" {row.gpu}"
                older = f" ({_day(row):%b %-d})" if row and newest_day and newest_day - _day(row) > SAME else ""
                time = f"**{_ms(row.ours['ms']['median'])}**{card}{older}" if row else ""
                cells.append(f"{time} {guess}".strip() or "-")
            yield f"| {title if precision == 'bf16' else ''} | {precision} | {' | '.join(cells)} |\n"


def _day(row: Row) -> date:
    return date.fromisoformat(row.file.name[:10])


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def page() -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    print(table())
