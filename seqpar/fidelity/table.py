"""Judges every way of computing a request as `verify` judges one, and shows the verdicts as a table.

A way fails if `verify` fails in it, if its run ends in an error, or if another transport gives the same layout other
bits: transports only move data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity.compare import NOT_FINITE, first_unequal
from seqpar.fidelity.verify import Verdict, verdict_of
from seqpar.fidelity.ways import Meshes, Way
from seqpar.pipelines._pictures import written
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.request import Request
from seqpar.types.arguments import MOST_STEPS

OUTLIER = 8.0  # a power of two, so that planted outliers are the same numbers in every data type
OUTLIERS = 128  # one channel of this many is an outlier, and at least one


@dataclass(frozen=True)
class Row:
    """The verdict on one way of computing a request; None if its run ended in an error.

    weights: what the weights are. local: the local attention. findings: why the way does not hold; none if it does.
    """

    weights: str
    dtype: torch.dtype
    way: Way
    local: str = "-"
    verdict: Verdict | None = None
    findings: tuple[str, ...] = ()

    @property
    def failures(self) -> list[str]:
        """Return a sentence for every finding."""
        return [f"{self.weights}, {_name(self.dtype)}, {self.way}: {finding}" for finding in self.findings]

    @property
    def bits(self) -> Mapping[Any, str]:
        """Return the digests of rank 0."""
        return {} if self.verdict is None else dict(self.verdict.bits)


def judged(
    weights: str, model: nn.Module, request: Request, listed: Sequence[Way], meshes: Meshes, wish: Wish
) -> list[Row]:
    """Return a row for each way of computing a request with this model; every process must call this together.

    listed: as `seqpar.fidelity.ways.ways` returns them, one rank first; no other way is judged where one rank alone
    cannot compute the request in the model's data type. wish: names the local attention.
    """
    rows = list[Row]()
    for way in listed:
        row = _row(weights, model, request, way, meshes, wish)
        rows.append(replace(row, findings=(*row.findings, *_unequal(row, rows))))
        if way.ranks == 1 and any(NOT_FINITE in finding for finding in row.findings):
            break
    return rows


def _row(weights: str, model: nn.Module, request: Request, way: Way, meshes: Meshes, wish: Wish) -> Row:
    """Compute a way on its ranks; return its row on every process."""
    mesh, row = meshes.of(*way.layout.sizes.values()), Row(weights, next(model.parameters()).dtype, way)
    if mesh is not None:
        try:
            row = _computed(row, model, request, mesh, wish)
        except (ValueError, FloatingPointError) as error:  # raised alike on all ranks of the way
            row = replace(row, findings=(str(error),))
    return meshes.ranks.share(row, Row)  # rank 0 is a rank of every way


def _computed(row: Row, model: nn.Module, request: Request, mesh: Mesh, wish: Wish) -> Row:
    """Return the row with its verdict; all ranks of the mesh must call this together."""
    transport = "auto" if row.way.transport == "-" else row.way.transport
    dit = DistributedDiT(model, mesh, row.way.layout.strategy, wish.local, transport)
    try:
        verdict = verdict_of(dit, request, MOST_STEPS)
        findings = () if verdict.finding is None else (verdict.finding,)
        return replace(row, local=dit.local.name, verdict=verdict, findings=findings)
    finally:
        dit.release()


def _unequal(row: Row, others: Sequence[Row]) -> list[str]:
    """Return a finding for each other row of the same layout whose bits a row has not."""
    twins = [
        other for other in others if replace(other.way.layout, transport="") == replace(row.way.layout, transport="")
    ]
    places = [(other, first_unequal(row.bits, other.bits)) for other in twins if row.bits and other.bits]
    reason = "expected the same: only data moves"
    return [f"{place}: other bits than {other.way}, {reason}" for other, place in places if place is not None]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table whose columns are aligned, or no text without rows.

    error: the largest error of a prediction. x one rank: the largest error of any head, block or prediction, in units
    of that of one rank in the same data type; at: where. bits: whether predictions and states have one rank's bits.
    """
    every = [_cells(row, rows) for row in rows]
    widths = {name: max(len(cells[name]) for cells in ({name: name}, *every)) for name in (every[0] if every else ())}
    lines = [dict(zip(widths, widths, strict=True)), {name: "-" * width for name, width in widths.items()}, *every]
    return "\n".join(f"| {' | '.join(line[name].ljust(width) for name, width in widths.items())} |" for line in lines)


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the row's text in each column."""
    alone = [each.bits for each in rows if each.way.ranks == 1 and _same_run(each, row)]
    return {
        "weights": row.weights,
        "dtype": _name(row.dtype),
        "ranks": str(row.way.ranks),
        "layout": str(row.way.layout),
        "strategy": row.way.strategy,
        "transport": row.way.transport,
        "attention": row.local,
        "error": "-" if row.verdict is None else f"{row.verdict.error:.1e}",
        "x one rank": "-" if row.verdict is None else f"{row.verdict.ratio:.2f}",
        "at": "-" if row.verdict is None else row.verdict.where,
        "bits": "-" if row.way.ranks == 1 or not row.bits else "one rank's" if row.bits in alone else "others",
        "verdict": f"FAILS: {row.findings[0]}" if row.findings else "holds",
    }


def _same_run(row: Row, other: Row) -> bool:
    return (row.weights, row.dtype) == (other.weights, other.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write(folder: Path, text: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Write the text as table.md, and rows and `facts` as table.json, into a folder, each whole or not at all."""
    cells = [{**_cells(row, rows), "findings": row.findings} for row in rows]
    for name, content in (("table.md", text), ("table.json", json.dumps({**facts, "rows": cells}, indent=1))):
        with written(folder / name) as path:
            path.write_text(f"{content}\n", encoding="utf-8")


@torch.no_grad()
def plant_outliers(model: nn.Module) -> None:
    """Multiply a few rows of every linear layer but the last, in place: each makes one channel of a layer's output.

    Trained transformers have such channels, random weights have none. With them sums cancel, scores of attention grow,
    and one channel decides the statistics of a norm, so that arithmetic which is too narrow shows.
    """
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not getattr(model, "final", None):
            rows = torch.randperm(layer.out_features, generator=generator)[: max(1, layer.out_features // OUTLIERS)]
            for x in (layer.weight, layer.bias):
                if x is not None:
                    x[rows.to(x.device)] *= OUTLIER
