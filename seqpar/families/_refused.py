"""Transformers of diffusers whose tokens are not split over ranks, and why: class -> the reason."""

from __future__ import annotations

from collections.abc import Mapping

REGROUPS = "it groups its tokens by picture and by place in turn, and no split of them fits both"
LINEAR = "it mixes tokens by linear attention and convolutions, and strategies split softmax attention"
MASKS = "its mask differs between queries, which no strategy splits"
PART = "U-Nets compute it between convolutions, which need neighbouring tokens"

REFUSED: Mapping[str, str] = {
    "AnyFlowFARTransformer3DModel": MASKS,
    "DreamLiteTransformer2DModel": PART,
    "Kandinsky6SRTransformer3DModel": "it chooses keys for blocks of tokens by their values",
    "LatteTransformer3DModel": REGROUPS,
    "MiniMaxMusic3RVQDepthDecoder": "it makes codes one after another, each from those before it",
    "OmniGenTransformer2DModel": MASKS,
    "PriorTransformer": MASKS,
    "RFD4ProteinaTransformer": "it adds numbers of each pair of tokens to the scores",
    "SanaTransformer2DModel": LINEAR,
    "SanaVideoTransformer3DModel": LINEAR,
    "SanaWMTransformer3DModel": LINEAR,
    "Transformer2DModel": PART,
    "TransformerTemporalModel": REGROUPS,
    "WanAnimate2Transformer3DModel": MASKS,
}
