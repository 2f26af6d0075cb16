"""Large-DiT: a class-conditional DiT with LLaMA blocks (RMSNorm, QK-LayerNorm, rotary, SwiGLU); 600M, 3B, 7B.

The names are approximate: 3B has 4.24 B parameters, 7B has 7.29 B. It loads the folders that `seqpar convert` writes of
the files of Alpha-VLLM's LLaMA2-Accessory. Two details are easy to get wrong. QK-norm is a LayerNorm over all heads,
before the head split. Rotary angles follow the raster index of a token.
Letters: see `seqpar.types.protocols`; F = feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.families._block import Input
from seqpar.kernels.adaln import Norm
from seqpar.loading import schemas
from seqpar.loop.interface import MatrixBlock
from seqpar.loop.models import _layers
from seqpar.loop.models._label_dit import AdaLN, LabelDiT, check_outputs, confirm, count_classes
from seqpar.types.facts import Blocks, Work
from seqpar.types.keys import KeyMap, count_layers, shape_of
from seqpar.types.protocols import Attend, Given, Prepare, Stream

CONDITION = 1024  # width of timestep and label embeddings, unless the model is narrower
QK_EPS = 1e-5


@dataclass(frozen=True)
class Config:
    """Sizes and variants of a Large-DiT; the defaults are those of the released ImageNet 3B model.

    qk_norm_groups: QK-norm is over the heads of one group; a model trained on N model-parallel ranks has N groups.
    """

    width: int = 3072
    num_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    feed_forward: int = 8192
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    sample_size: int = 32
    num_classes: int = 1000
    qk_norm: bool = True
    norm_eps: float = 1e-5
    qk_norm_groups: int = 1

    @property
    def attention_head_dim(self) -> int:
        """D, the width of a head."""
        return self.width // self.num_attention_heads

    @property
    def condition_width(self) -> int:
        """The width of the condition from which adaLN computes its modulation."""
        return min(self.width, CONDITION)


class Block(MatrixBlock):
    """A transformer block of attention and SwiGLU; each input is normalised and modulated, each output is gated."""

    MATRICES = ("qkv", "wo", "w13", "w2")

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.attention_head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        kv_width = config.num_key_value_heads * self.head_dim
        self.modulation = nn.Linear(config.condition_width, 6 * width)
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.q_norm = nn.LayerNorm(width) if config.qk_norm else None
        self.k_norm = nn.LayerNorm(kv_width) if config.qk_norm else None
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width)
        self.w13 = nn.Linear(width, 2 * config.feed_forward, bias=False)
        self.w2 = nn.Linear(config.feed_forward, width, bias=False)
        self.norm = ("rms", config.norm_eps)
        self.groups = config.qk_norm_groups

    def prepare(self, cos_lD2: Tensor, sin_lD2: Tensor) -> Prepare:
        """The preparation of q and k: LayerNorm over the whole width, then rotary on neighbouring pairs."""
        if self.q_norm is None or self.k_norm is None or self.groups > 1:
            return Prepare(cos_lD2=cos_lD2, sin_lD2=sin_lD2)
        q, k = self.q_norm, self.k_norm
        return Prepare("layer", False, QK_EPS, q.weight, q.bias, k.weight, k.bias, cos_lD2, sin_lD2)

    def stream(self, h_BlE: Input, rotary: tuple[Tensor, Tensor]) -> Stream:
        """The tokens on their way to attention; norms over groups of heads are applied here, by torch."""
        (heads, kv_heads, _), prepare, qkv = self.heads, self.prepare(*rotary), self.matrix("qkv")
        if self.groups == 1 or self.q_norm is None or self.k_norm is None:
            return qkv.projected(h_BlE, heads, prepare, kv_heads)
        q, k, v = qkv(h_BlE).split([count * self.head_dim for count in self.heads], dim=-1)
        q, k = self._grouped(q, self.q_norm), self._grouped(k, self.k_norm)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        return Given(q, k, v, prepare)

    def _grouped(self, x_BlE: Tensor, norm: nn.LayerNorm) -> Tensor:
        # LayerNorm over each group of heads
        x = x_BlE.unflatten(-1, (self.groups, -1))
        return torch.addcmul(norm.bias, F.layer_norm(x, x.shape[-1:], eps=QK_EPS).flatten(-2), norm.weight)

    def start(self, modulation_B6E: Tensor) -> AdaLN:
        """What comes before attention."""
        norm = Norm(*self.norm, self.attention_norm.weight)
        return AdaLN(modulation_B6E[:, 0], modulation_B6E[:, 1], norm, self.matrix("qkv").rounding)

    def forward(
        self,
        x_BlE: Tensor,
        h_BlE: Input,
        modulation_B6E: Tensor,
        rotary: tuple[Tensor, Tensor],
        after: AdaLN,
        attend: Attend,
        *,
        keep: bool = True,
    ) -> tuple[Tensor, Input]:
        """The stream x and its normalised, modulated form h after this block; see `dit.Block`."""
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation_B6E.unbind(1)
        _, wo, w13, w2 = map(self.matrix, self.MATRICES)
        (out,) = attend((self.stream(h_BlE, rotary),))
        before_ffn = AdaLN(shift_mlp, scale_mlp, Norm(*self.norm, self.ffn_norm.weight), w13.rounding)
        x, h = before_ffn.after(x_BlE, gate, wo(out.flatten(2)))
        h = w13.swiglu(h, w2, tokens=attend.tokens)
        return after.after(x, gate_mlp, w2(h), keep)


class Model(LabelDiT):
    """The Large-DiT model; its condition is at most 1024 wide."""

    config: Config
    FINAL_NORM = Norm("layer", 1e-6)

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.condition_width, lambda: Block(config))

    def positions(self, *size: int) -> Tensor:
        """The rotary rows (L, D): cosines, then sines, of the raster index.

        They have the bits of the original's table, which is computed in fp32 by `torch.polar` on the CPU: `torch.cos`
        and other devices round differently, by up to 6e-8.
        """
        (height, width), patch, dim = size, self.config.patch_size, self.config.attention_head_dim
        index = torch.arange((height // patch) * (width // patch), dtype=torch.float32, device="cpu")
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        angles = torch.outer(index, 1.0 / _layers.MAX_PERIOD**exponent)
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turns.real, turns.imag), dim=-1).to(self.x_embedder.weight.device)

    def embedded(self, patches_BlI: Tensor, positions: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, ...]]]:
        return self.x_embedder(patches_BlI.to(self.x_embedder.weight.dtype)), (positions.chunk(2, dim=-1),)


def work(config: Config) -> Work:
    # passes: two gated norms (4 E each) and SwiGLU (3 F) per block; live: SwiGLU or QKV
    width, ffn, area = config.width, config.feed_forward, config.patch_size**2
    kv_width = config.num_key_value_heads * config.attention_head_dim
    blocks = Blocks(
        count=config.num_layers,
        gemms=((width, width + 2 * kv_width), (width, width), (width, 2 * ffn), (ffn, width)),
        passes=(4 * width, 4 * width, 3 * ffn),
    )
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.attention_head_dim,
        blocks=(blocks,),
        prepares=True,
        once=((config.in_channels * area, width), (width, config.out_channels * area)),
        table=(6 * config.num_layers + 2) * width,
        live=max(4 * width + 3 * ffn, 5 * width + 2 * kv_width),
    )


SIZES: dict[str, Config] = {
    "large-dit-600m": Config(1536, 16, feed_forward=4096),
    "large-dit-3b": Config(3072, 32, feed_forward=8192),
    "large-dit-7b": Config(4096, 32, feed_forward=11008),
}

# Checkpoints ---------------------------------------------------------------------------------------------------

CHANNELS = 4  # of the latent; the patch size follows
CLASS = "DiTLLaMA2DModel"  # in config.json; diffusers has no such model


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True):
    """The fields of config.json."""

    num_attention_heads: schemas.Heads
    attention_head_dim: schemas.HeadDim
    num_layers: schemas.Layers | None = None
    patch_size: schemas.Patch | None = None
    in_channels: schemas.Channels | None = None
    out_channels: schemas.Channels | None = None
    sample_size: schemas.Side | None = None
    n_kv_heads: schemas.Heads | None = None
    num_classes: schemas.Classes | None = None
    norm_eps: schemas.Epsilon | None = None
    qk_norm: bool | None = None
    learn_sigma: bool | None = None
    qk_norm_groups: schemas.Heads | None = None


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Config | None:
    """The config of a folder that `seqpar convert` wrote, or None for another model's.

    Raises ValueError if config.json and tensors contradict each other.
    """
    if config.get("_class_name") != CLASS:
        return None
    sizes, read = from_shapes(shapes), schemas.checked("a Large-DiT config", config, Fields)
    heads, dim = read.num_attention_heads, read.attention_head_dim
    if heads * dim != sizes["width"]:
        raise ValueError(
            f"got a Large-DiT config with {heads} heads of width {dim}, but the tensors are {sizes['width']} wide"
        )
    confirm("Large-DiT", config, {key: value for key, value in sizes.items() if key != "num_key_value_heads"})
    complete = with_heads(sizes, heads)
    confirm("Large-DiT", {"n_kv_heads": read.n_kv_heads}, {"n_kv_heads": complete["num_key_value_heads"]})
    stated = ("sample_size", "norm_eps", "qk_norm_groups")
    return Config(**complete | {name: config[name] for name in stated if config.get(name) is not None})


def from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The sizes that shapes state; num_key_value_heads is a width until `with_heads`."""
    width, inputs = shape_of(shapes, "x_embedder.weight", 2)
    patch, final = round((inputs / CHANNELS) ** 0.5), "final_layer.linear.weight"
    if CHANNELS * patch**2 != inputs:
        expected = f"{CHANNELS} x patch x patch columns"
        raise ValueError(f"got a Large-DiT with x_embedder.weight of shape {(width, inputs)}, expected {expected}")
    outputs = _layers.output_channels(final, shape_of(shapes, final, 2)[0], patch)
    check_outputs("Large-DiT", CHANNELS, outputs)
    return {
        "width": width,
        "num_layers": count_layers(shapes, "layers"),
        "num_key_value_heads": shape_of(shapes, "layers.0.attention.wk.weight", 2)[0],
        "feed_forward": shape_of(shapes, "layers.0.feed_forward.w1.weight", 2)[0],
        "patch_size": patch,
        "in_channels": CHANNELS,
        "out_channels": outputs,
        "num_classes": count_classes(shapes),
        "qk_norm": any(".attention.q_norm." in key or ".attention.k_norm." in key for key in shapes),
    }


def with_heads(sizes: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Sizes with the numbers of heads; ValueError if keys and values have no whole number of them."""
    width, kv_width = sizes["width"], sizes["num_key_value_heads"]
    kv_heads = kv_width * heads // width
    if width % heads or width // heads % 2 or kv_heads * (width // heads) != kv_width or heads % max(kv_heads, 1):
        raise ValueError(f"got {heads} heads for a Large-DiT whose queries are {width} and keys {kv_width} wide")
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def key_map(config: Config) -> KeyMap:
    """The authors' keys, which the folder has; q, k and v become one matrix, and so do w1 and w3."""
    ends = {
        "x_embedder": "x_embedder",
        "t_embedder.0": "t_embedder.mlp.0",
        "t_embedder.2": "t_embedder.mlp.2",
        "final_modulation": "final_layer.adaLN_modulation.1",
    }
    matrices = {
        "qkv": ("attention.wq", "attention.wk", "attention.wv"),
        "wo": "attention.wo",
        "w13": ("feed_forward.w1", "feed_forward.w3"),
        "w2": "feed_forward.w2",
        "attention_norm": "attention_norm",
        "ffn_norm": "ffn_norm",
    }
    others = {"modulation": "adaLN_modulation.1"}
    others |= {"q_norm": "attention.q_norm", "k_norm": "attention.k_norm"} if config.qk_norm else {}
    sources = _layers.layers(ends) | _layers.layers({"y_embedder": "y_embedder.embedding_table"}, kinds=("weight",))
    sources |= _layers.last("final", "final_layer.linear", config.out_channels, config.patch_size)
    for i in range(config.num_layers):
        sources |= _layers.layers(matrices, f"blocks.{i}.", f"layers.{i}.", ("weight",))
        sources |= _layers.layers(others, f"blocks.{i}.", f"layers.{i}.")
    return KeyMap(sources)
