"""Writes what a comparison found: a table, every error as JSON, and a picture of the largest differences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from seqpar.fidelity.compare import Error, Place
from seqpar.fidelity.judging import Errors, Pictures, Row
from seqpar.pipelines._pictures import GAP, INK, PAPER, SHOWN, save, to_pil, written

COLUMNS = (
    *("weights", "dtype", "ranks", "layout", "strategy", "transport", "attention"),
    *("same inputs", "x plain", "own run", "PSNR dB", "SSIM", "LPIPS", "bits", "verdict"),
)
AMPLIFIED = 0.5  # brightness of the largest difference in the difference picture
LINE = 20  # pixels of a caption


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table whose columns are aligned.

    same inputs: the error of a prediction on the reference's inputs, median of all steps and the largest. x plain: the
    largest ratio to the plain run of that type. own run: the error of the way's latents.
    """
    cells = [COLUMNS, *(_cells(row, rows) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in cells]
    return "\n".join([lines[0], f"| {' | '.join('-' * width for width in widths)} |", *lines[1:]])


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    way, like = row.way, row.like
    where = ("1", "plain", "-", "-") if way is None else (str(way.ranks), str(way.layout), way.strategy, way.transport)
    errors = sorted(error.rms for error in row.same.values())
    same = f"{errors[len(errors) // 2]:.1e}, {errors[-1]:.1e}" if errors else "-"
    own = f"{_last(row.own).rms:.1e}" if row.own else "-"
    quality = ("-", "-", "-")
    if like is not None:
        shown = "-" if like.lpips is None else f"{like.lpips:.4f}"
        quality = ("equal" if math.isinf(like.psnr) else f"{like.psnr:.1f}", f"{like.ssim:.4f}", shown)
    ratio = "-" if way is None or math.isnan(row.ratio) else f"{row.ratio:.2f}"
    verdict = "holds" if not row.findings else f"FAILS: {row.findings[0]}"
    name = str(row.dtype).removeprefix("torch.")
    return (row.subject, name, *where, row.local, same, ratio, own, *quality, _bits(row, rows), verdict)


def _bits(row: Row, rows: Sequence[Row]) -> str:
    """Return whether a row has the bits of the engine on one rank."""
    if row.way is None or row.way.ranks == 1 or not row.bits:
        return "-"
    alone = [x.bits for x in rows if x.way and x.way.ranks == 1 and (x.subject, x.dtype) == (row.subject, row.dtype)]
    return "one rank's" if row.bits in alone else "others"


def _last(errors: Errors) -> Error:
    return errors[max(errors)]


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every finding of every row."""
    return [
        f"{row.subject}, {str(row.dtype).removeprefix('torch.')}, {row.way or 'plain'}: {finding}"
        for row in rows
        for finding in row.findings
    ]


def write(folder: Path, text: str, rows: Sequence[Row], pictures: Sequence[Pictures], facts: dict[str, Any]) -> None:
    """Write table.md, errors.json and difference.png into a folder, each whole or not at all."""
    with written(folder / "table.md") as path:
        path.write_text(text + "\n", encoding="utf-8")
    with written(folder / "errors.json") as path:
        path.write_text(json.dumps({**facts, "rows": [_data(row) for row in rows]}, indent=1), encoding="utf-8")
    if pictures:
        save(difference(pictures), folder / "difference.png", facts)


def _data(row: Row) -> dict[str, Any]:
    def listed(errors: Errors) -> list[dict[str, Any]]:
        return [_entry(place, errors[place]) for place in sorted(errors)]

    return {
        "weights": row.subject,
        "dtype": str(row.dtype).removeprefix("torch."),
        "way": None if row.way is None else str(row.way),
        "ratio": row.ratio,
        "same_inputs": listed(row.same),
        "own_run": listed(row.own),
        "pictures": None if row.like is None else vars(row.like),
        "bits": row.bits,
        "findings": row.findings,
    }


def _entry(place: Place, error: Error) -> dict[str, Any]:
    return {"step": place.step, "of": place.name, "rms": error.rms, "largest": error.largest}


def difference(pictures: Sequence[Pictures]) -> Image.Image:
    """Return a sheet with a line for each data type: the reference, the way that differs most, and the difference.

    Of several pictures the one that differs most is shown. Differences are amplified, so that the largest has about
    half of full brightness; the factor is in the caption.
    """
    strips = [_strip(each) for each in pictures]
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), PAPER)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def _strip(pictures: Pictures) -> Image.Image:
    """Return one line of the sheet, with its caption below."""
    distances = (pictures.got - pictures.truth).abs().flatten(1)
    index = int(distances.mean(dim=1).argmax())
    difference = (pictures.got[index] - pictures.truth[index]).abs()
    factor = _factor(float(difference.max()))
    shown = torch.stack((pictures.truth[index], pictures.got[index], (difference * factor).clamp(0, 1)))
    images = [_enlarged(image) for image in to_pil(shown)]
    row, font = pictures.row, ImageFont.load_default(size=13)
    psnr = "" if row.like is None else f", PSNR {row.like.psnr:.1f} dB"
    caption = f"{row.subject}, {str(row.dtype).removeprefix('torch.')}, {row.way}{psnr}"
    text = f"{caption}: the reference, this way, the difference x {factor:g}"
    width = max(sum(image.width + GAP for image in images), int(font.getlength(text)) + GAP) + GAP
    strip = Image.new("RGB", (width, images[0].height + LINE + 2 * GAP), PAPER)
    for place, image in enumerate(images):
        strip.paste(image, (GAP + place * (image.width + GAP), GAP))
    ImageDraw.Draw(strip).text((GAP, images[0].height + GAP + LINE / 2), text, INK, font, anchor="lm")
    return strip


def _factor(largest: float) -> float:
    """Return a power of two that makes the largest difference about half of full brightness."""
    return 2.0 ** math.floor(math.log2(2 * AMPLIFIED / largest)) if largest > 0 else 1.0


def _enlarged(image: Image.Image) -> Image.Image:
    scale = max(1, SHOWN // max(image.size))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
