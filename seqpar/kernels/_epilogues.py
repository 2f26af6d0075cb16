"""What happens to a product's sums before they are written, for quack (CuTe DSL): imported only where it is installed.

A function per epilogue, called once an element (a pair of neighbouring columns in mode "acc_pair") on fp32 sums.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack


@gemm_epilogue(outputs=("out",), mode="acc_pair")
def gated(acc: Any) -> dict[str, Any]:
    """SwiGLU of rows of w1|w3, which `concat_layout` interleaves."""
    gate, up = unpack(acc)
    return {"out": swiglu(gate, up)}
