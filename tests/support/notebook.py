"""Runs the cells of examples/seqpar.ipynb in turn, as Jupyter does, and writes what they show into it.

python -m tests.support.notebook --write

The notebook needs no Jupyter here: a cell's prints and its last value (text, or a picture of Pillow) are its outputs.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "seqpar.ipynb"


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the code of a cell among these names, and return its outputs as a notebook holds them."""
    *statements, last = ast.parse(source).body
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        if not isinstance(last, ast.Expr):
            statements, last = [*statements, last], None
        exec(compile(ast.Module(statements, []), "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown(value)})
    return outputs


def shown(value: Any) -> dict[str, Any]:
    if not hasattr(value, "_repr_png_"):
        return {"text/plain": [repr(value)]}
    return {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["a picture"]}


def executed() -> dict[str, Any]:
    """Return the notebook with the outputs of all cells, each of which ran in the repository's folder."""
    notebook, names = json.loads(NOTEBOOK.read_text(encoding="utf-8")), dict[str, Any]()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
            cell["outputs"], cell["execution_count"] = run("".join(cell["source"]), names), number
    finally:
        os.chdir(before)
    return notebook


if __name__ == "__main__":
    with_outputs = json.dumps(executed(), indent=1, ensure_ascii=False) + "\n"
    if "--write" in sys.argv:
        NOTEBOOK.write_text(with_outputs, encoding="utf-8")
