"""Products of quack (CuTe DSL) with epilogues: what is done to the sums of a matrix product before they are written.

This module is imported only where quack is installed. quack calls an epilogue's function once for each element (for
each pair of neighbouring columns in mode "acc_pair") with fp32 sums.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act
from torch import Tensor

from seqpar.kernels._quack import Tile


@gemm_epilogue(outputs=("out",), mode="acc_pair")
def gated(acc: Any) -> dict[str, Any]:
    """Apply SwiGLU to the products with w1 and w3, whose rows `concat_layout` interleaves."""
    gate, up = unpack(acc)
    return {"out": swiglu(gate, up)}


def gelu_of_product(x_RE: Tensor, weight_FE: Tensor, bias_F: Tensor, tile: Tile) -> Tensor:
    rows, columns, cluster_rows, cluster_columns, pingpong = tile
    config = GemmConfig(
        tile_m=rows, tile_n=columns, cluster_m=cluster_rows, cluster_n=cluster_columns, pingpong=pingpong
    )
    how = {"store_preact": False, "tuned": False, "config": config}
    return gemm_act(x_RE, weight_FE.t(), bias=bias_F, activation="gelu_tanh_approx", **how)[1]
