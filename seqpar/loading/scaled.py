"""Folders whose transformer lies in 8 bits: `NAME.weight` in e4m3 with `NAME.weight_scale` (F, 1) in fp32.

compressed-tensors and ComfyUI name them so. `seqpar convert --precision fp8` writes such folders.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqpar.kernels.rows8 import E4M3
from seqpar.kernels.weight8 import Weight8, widened
from seqpar.loading.checkpoint import Checkpoint
from seqpar.types.keys import TensorSource

SCALE = "_scale"  # after the key of a weight
MARK = {"quant_method": "seqpar-e4m3"}
"""The config's `quantization_config`: diffusers' own loader, which would leave the scales out, refuses it."""
STANDS_FOR = torch.bfloat16


def as_numbers(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose weights in e4m3 are the numbers in bf16 for which they stand; others as they are.

    Raises ValueError for scales that do not fit.
    """
    weights = [key.removesuffix(SCALE) for key in checkpoint.shapes if key.endswith(f".weight{SCALE}")]
    if not weights:
        return checkpoint
    for key in weights:
        shape, scale = checkpoint.shapes.get(key, ()), key + SCALE
        right = len(shape) == 2 and checkpoint.shapes[scale] == (shape[0], 1)
        if not right or (checkpoint.dtypes[key], checkpoint.dtypes[scale]) != (E4M3, torch.float32):
            raise ValueError(f"{checkpoint.name}: {scale} fits no weight in e4m3 with a scale in fp32 for each row")
    scales = {key + SCALE for key in weights}
    if bare := next((key for key, kind in checkpoint.dtypes.items() if kind == E4M3 and key not in weights), None):
        raise ValueError(f"{checkpoint.name}: {bare} is in e4m3 without {bare}{SCALE}")
    shapes = {key: shape for key, shape in checkpoint.shapes.items() if key not in scales}
    places = {key: place for key, place in checkpoint.positions.items() if key not in {*weights, *scales}}

    def read(key: str) -> Tensor:
        if key not in weights:
            return checkpoint.read(key)
        return widened(checkpoint.read(key), checkpoint.read(key + SCALE).flatten(), STANDS_FOR)

    dtypes = {**{key: checkpoint.dtypes[key] for key in shapes}, **dict.fromkeys(weights, STANDS_FOR)}
    return replace(checkpoint, shapes=shapes, dtypes=dtypes, positions=places, read=read, raw=checkpoint)


def source_of(key: str, dtype: torch.dtype, stored: bool) -> TensorSource:
    """Return how a weight is made from a file's e4m3 and scales. stored: it stays in 8 bits, as a `Weight8`."""

    def combine(values: Tensor, scales: Tensor) -> Tensor:
        weight = Weight8(values, scales.flatten(), dtype)
        return weight if stored else weight.wide()

    return TensorSource((key, key + SCALE), combine, raw=True)
