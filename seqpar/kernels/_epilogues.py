"""Epilogues of quack (CuTe DSL): what is done to the sums of a matrix product before they are written.

This module is imported only where quack is installed. quack calls an epilogue's function once for each element (for
each pair of neighbouring columns in mode "acc_pair") with fp32 sums.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack


@gemm_epilogue(outputs=("out",), mode="acc_pair")
def gated(acc: Any) -> dict[str, Any]:
    """Apply SwiGLU to the products with w1 and w3, whose rows `concat_layout` interleaves."""
    gate, up = unpack(acc)
    return {"out": swiglu(gate, up)}
