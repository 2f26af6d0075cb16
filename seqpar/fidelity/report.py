"""Writes what a comparison found: a table, every error as JSON, and a picture of the largest differences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seqpar.fidelity.judging import Row
from seqpar.fidelity.runs import Errors
from seqpar.pipelines._pictures import GAP, INK, PAPER, SHOWN, save, to_pil, written

AMPLIFIED = 0.5  # brightness of the largest difference in the difference picture
LINE = 20  # pixels of a caption


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table whose columns are aligned, or no text without rows.

    same inputs: the error of a prediction on the reference's inputs, median of all steps and the largest. x plain: the
    largest ratio to the plain run of that type. own run: the error of the way's latents.
    """
    every = [_cells(row, rows) for row in rows]
    widths = {name: max(len(cells[name]) for cells in ({name: name}, *every)) for name in (every[0] if every else ())}
    lines = [dict(zip(widths, widths, strict=True)), {name: "-" * width for name, width in widths.items()}, *every]
    return "\n".join(f"| {' | '.join(line[name].ljust(width) for name, width in widths.items())} |" for line in lines)


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the row's text in each column."""
    way, like, errors = row.way, row.like, sorted(error.rms for error in row.same.values())
    return {
        "weights": row.subject,
        "dtype": _name(row),
        "ranks": "1" if way is None else str(way.ranks),
        "layout": "plain" if way is None else str(way.layout),
        "strategy": "-" if way is None else way.strategy,
        "transport": "-" if way is None else way.transport,
        "attention": row.local,
        "same inputs": f"{errors[len(errors) // 2]:.1e}, {errors[-1]:.1e}" if errors else "-",
        "x plain": "-" if way is None or math.isnan(row.ratio) else f"{row.ratio:.2f}",
        "own run": f"{row.own[max(row.own)].rms:.1e}" if row.own else "-",
        "PSNR dB": "-" if like is None else "equal" if math.isinf(like.psnr) else f"{like.psnr:.1f}",
        "SSIM": "-" if like is None else f"{like.ssim:.4f}",
        "LPIPS": "-" if like is None or like.lpips is None else f"{like.lpips:.4f}",
        "bits": _bits(row, rows),
        "verdict": f"FAILS: {row.findings[0]}" if row.findings else "holds",
    }


def _bits(row: Row, rows: Sequence[Row]) -> str:
    """Return whether a row has the bits of the engine on one rank."""
    if row.way is None or row.way.ranks == 1 or not row.bits:
        return "-"
    alone = [x.bits for x in rows if x.way and x.way.ranks == 1 and (x.subject, x.dtype) == (row.subject, row.dtype)]
    return "one rank's" if row.bits in alone else "others"


def _name(row: Row) -> str:
    return str(row.dtype).removeprefix("torch.")


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every finding of every row."""
    return [f"{row.subject}, {_name(row)}, {row.way or 'plain'}: {finding}" for row in rows for finding in row.findings]


def write(folder: Path, text: str, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Write table.md, errors.json and difference.png into a folder, each whole or not at all."""
    with written(folder / "table.md") as path:
        path.write_text(text + "\n", encoding="utf-8")
    with written(folder / "errors.json") as path:
        path.write_text(json.dumps({**facts, "rows": [_data(row) for row in rows]}, indent=1), encoding="utf-8")
    if any(row.way is not None and row.picture is not None for row in rows):
        save(difference(rows), folder / "difference.png", facts)


def _data(row: Row) -> dict[str, Any]:
    def listed(errors: Errors) -> list[dict[str, Any]]:
        return [{"step": place.step, "of": place.name, **vars(errors[place])} for place in sorted(errors)]

    return {
        "weights": row.subject,
        "dtype": _name(row),
        "way": None if row.way is None else str(row.way),
        "ratio": row.ratio,
        "same_inputs": listed(row.same),
        "own_run": listed(row.own),
        "pictures": None if row.like is None else vars(row.like),
        "bits": row.bits,
        "findings": row.findings,
    }


def difference(rows: Sequence[Row]) -> Image.Image:
    """Return a sheet with a line for each data type: the reference, the way that differs most, and the difference.

    Of several pictures the one that differs most is shown. Differences are amplified, so that the largest has about
    half of full brightness; the factor is in the caption.
    """
    truths = {(row.subject, row.dtype): row.picture for row in rows if row.way is None}
    pairs = [(row, truths[row.subject, row.dtype], row.picture) for row in rows if row.way is not None]
    strips = [_strip(row, truth, got) for row, truth, got in pairs if truth is not None and got is not None]
    sheet = Image.new("RGB", (max(strip.width for strip in strips), sum(strip.height for strip in strips)), PAPER)
    for number, strip in enumerate(strips):
        sheet.paste(strip, (0, sum(above.height for above in strips[:number])))
    return sheet


def _strip(row: Row, truth_N3HW: Tensor, got_N3HW: Tensor) -> Image.Image:
    """Return one line of the sheet, with its caption below."""
    distances = (got_N3HW - truth_N3HW).abs()
    index = int(distances.flatten(1).mean(dim=1).argmax())
    truth, got, distance = (x[index] for x in (truth_N3HW, got_N3HW, distances))
    largest = float(distance.max())
    factor = 2.0 ** math.floor(math.log2(2 * AMPLIFIED / largest)) if largest > 0 else 1.0
    scale = max(1, SHOWN // max(truth.shape[1:]))
    shown = torch.stack((truth, got, (distance * factor).clamp(0, 1)))
    enlarged = F.pad(shown.repeat_interleave(scale, 2).repeat_interleave(scale, 3), (0, GAP), value=1.0)
    (image,) = to_pil(torch.cat([*enlarged], dim=2)[None])
    font = ImageFont.load_default(size=13)
    psnr = "" if row.like is None else f", PSNR {row.like.psnr:.1f} dB"
    text = f"{row.subject}, {_name(row)}, {row.way}{psnr}: the reference, this way, the difference x {factor:g}"
    width = max(image.width, int(font.getlength(text)) + GAP) + 2 * GAP
    strip = Image.new("RGB", (width, image.height + LINE + 2 * GAP), PAPER)
    strip.paste(image, (GAP, GAP))
    ImageDraw.Draw(strip).text((GAP, image.height + GAP + LINE / 2), text, INK, font, anchor="lm")
    return strip
