"""Tests that every cell of `examples/seqpar.ipynb` runs and shows what the notebook in the repository shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import notebook


def kinds(cells: list[dict[str, Any]]) -> list[list[list[str]]]:
    """Return what kinds of outputs each cell of code has."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [[sorted(output.get("data", {"text": ""})) for output in cell["outputs"]] for cell in code]


def test_the_cells_run_and_show_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kept, run = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8")), notebook.executed()
    assert kinds(run["cells"]) == kinds(kept["cells"]), "python -m tests.support.notebook --write"
    printed = ["".join(text for x in cell.get("outputs", ()) for text in x.get("text", ())) for cell in run["cells"]]
    assert sum("why cfg 2 x ulysses 2" in text for text in printed) == 1
    assert sum("Ulysses has the bits of one rank: True" in text for text in printed) == 1
    pictures = [kind for cell in kinds(run["cells"]) for kind in cell if "image/png" in kind]
    assert len(pictures) == 2
    assert notebook.NOTEBOOK.stat().st_size < 150_000


def test_a_cell_that_fails_fails_the_test() -> None:
    with pytest.raises(ZeroDivisionError):
        notebook.run("x = 1\nx / 0", {})
    assert notebook.run("print(1)\n2", {}) == [
        {"name": "stdout", "output_type": "stream", "text": ["1\n"]},
        {"output_type": "display_data", "metadata": {}, "data": {"text/plain": ["2"]}},
    ]
