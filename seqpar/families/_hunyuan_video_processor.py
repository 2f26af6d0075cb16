"""HunyuanVideo 1.5's attention processor, for split tokens."""

from __future__ import annotations

from typing import Any

from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from seqpar.families._mochi_processor import MochiProcessor


class HunyuanVideo15Processor(MochiProcessor):
    """The same with HunyuanVideo 1.5's rotary embedding, whose cos and sin (l, D) hold each number twice."""

    def turned(self, x_BlHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return q or k after the rotary embedding."""
        rows: Any = cos, sin
        rotated_BlHD: Any = apply_rotary_emb(x_BlHD, rows, sequence_dim=1)
        return rotated_BlHD
