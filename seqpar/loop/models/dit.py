"""DiT: class-conditional diffusion transformer with adaLN-Zero (arXiv 2212.09748), S/B/L/XL with patch 2/4/8.

It loads diffusers' `DiTTransformer2DModel` and the folders that `seqpar convert` writes of original files. The two
differ in arithmetic (`freq_shift`, `mlp_norm_eps`, positions at sizes other than the trained one); `Config` holds the
variant, and config.json states it. An original file has a table of positions, which training moves a little and may
learn as a whole; where it is not the one that is computed here, it is a weight of the model (`pos_stored`).
Letters: see `seqpar.types.protocols`; E = heads * head dim, F = 4 E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqpar.families._block import Input
from seqpar.kernels.adaln import Norm
from seqpar.loading import schemas
from seqpar.loop.interface import MatrixBlock
from seqpar.loop.models import _layers
from seqpar.loop.models._label_dit import AdaLN, LabelDiT, check_outputs
from seqpar.types.facts import Blocks, Work
from seqpar.types.keys import KeyMap, TensorSource
from seqpar.types.protocols import Attend, Prepare

NORM = Norm("layer", 1e-6)  # the norm before attention and before the final layer, in both variants


@dataclass(frozen=True)
class Config:
    """Sizes and variants of a DiT, named as in diffusers; the defaults are those of the original DiT-XL/2.

    pos_stored: whether the positions of the trained size are a weight. pos_scaling: what other sizes get.
    """

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    num_layers: int = 28
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    sample_size: int = 32
    num_classes: int = 1000
    attention_bias: bool = True
    freq_shift: float = 0.0
    mlp_norm_eps: float = 1e-6
    pos_scaling: Literal["interpolate", "none", "refuse"] = "none"
    pos_stored: bool = False

    @property
    def width(self) -> int:
        """E, the width of the model."""
        return self.num_attention_heads * self.attention_head_dim


class Block(MatrixBlock):
    """A transformer block of attention and MLP; each input is normalised and modulated, each output is gated."""

    MATRICES = ("qkv", "proj", "fc1", "fc2")

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.attention_head_dim
        self.heads = config.num_attention_heads
        self.mlp_norm = Norm("layer", config.mlp_norm_eps)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width, bias=config.attention_bias)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def start(self, modulation_B6E: Tensor) -> AdaLN:
        """What comes before attention."""
        return AdaLN(modulation_B6E[:, 0], modulation_B6E[:, 1], NORM, self.matrix("qkv").rounding)

    def forward(
        self, x_BlE: Tensor, h_BlE: Input, modulation_B6E: Tensor, after: AdaLN, attend: Attend, *, keep: bool = True
    ) -> tuple[Tensor, Input]:
        """The stream x and its normalised, modulated form h after this block.

        after: adaLN of the next block or final layer, because one kernel adds this block's gated branch to the stream
        and normalises it for the next one. keep: whether x is needed afterwards; the last block passes False.
        """
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation_B6E.unbind(1)
        qkv, proj, fc1, fc2 = map(self.matrix, self.MATRICES)
        (out,) = attend((qkv.projected(h_BlE, self.heads, Prepare()),))
        before_mlp = AdaLN(shift_mlp, scale_mlp, self.mlp_norm, fc1.rounding)
        x, h = before_mlp.after(x_BlE, gate, proj(out.flatten(2)))
        return after.after(x, gate_mlp, fc2(fc1.gelu(h, fc2)), keep)


class Model(LabelDiT):
    """The DiT model; its condition is as wide as the model."""

    config: Config
    FINAL_NORM = NORM

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.width, lambda: Block(config), config.freq_shift)
        if config.pos_stored:
            tokens = (config.sample_size // config.patch_size) ** 2
            self.pos_embed = nn.Parameter(torch.empty(1, tokens, config.width))

    def check_size(self, *size: int) -> None:
        super().check_size(*size)
        trained = self.config.sample_size
        if self.config.pos_scaling == "refuse" and size != (trained, trained):
            raise ValueError(
                f"got a latent of {' x '.join(map(str, size))} for a DiT with a learned table of positions, expected "
                f"{trained} x {trained}, the only size that its pos_embed has"
            )

    def positions(self, *size: int) -> Tensor:
        """The position rows (L, E) of a latent (height, width): sine-cosine, or the stored ones.

        At sizes other than the trained one, "interpolate" scales positions to the trained range, and "none" continues
        them past it.
        """
        self.check_size(*size)
        config = self.config
        if config.pos_stored and size == (config.sample_size,) * 2:
            return self.pos_embed.detach()[0]
        base, indices = config.sample_size // config.patch_size, []
        for side in size:
            index = torch.arange(side // config.patch_size, dtype=torch.float32, device=self.x_embedder.weight.device)
            indices.append(index / (len(index) / base) if config.pos_scaling == "interpolate" else index)
        return _layers.sincos_2d(indices[0], indices[1], config.width)

    def embedded(self, patches_BlI: Tensor, positions: Tensor) -> tuple[Tensor, tuple[()]]:
        dtype = self.x_embedder.weight.dtype
        return self.x_embedder(patches_BlI.to(dtype)) + positions.to(dtype), ()


def work(config: Config) -> Work:
    # passes: two gated norms (4 E each), bias and GELU (8 E) per block; live: the MLP
    width, area = config.width, config.patch_size**2
    blocks = Blocks(
        count=config.num_layers,
        gemms=((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)),
        passes=(4 * width, 4 * width, 8 * width),
    )
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        blocks=(blocks,),
        prepares=False,
        once=((config.in_channels * area, width), (width, config.out_channels * area)),
        table=(6 * config.num_layers + 2) * width,
        live=12 * width,
    )


# Published sizes: as random models for benchmarks and tests, too ---------------------------------------------------

_SIZES = {"s": (6, 64, 12), "b": (12, 64, 12), "l": (16, 64, 24), "xl": (16, 72, 28)}
SIZES: dict[str, Config] = {
    f"dit-{size}/{patch}": Config(heads, head_dim, layers, patch)
    for size, (heads, head_dim, layers) in _SIZES.items()
    for patch in (2, 4, 8)
}

# Checkpoints ---------------------------------------------------------------------------------------------------

LEARNED = "DiTLearnedPositions"  # class of a folder whose positions diffusers' class would replace by its own


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True):
    """The fields of diffusers' config, with the values that this file implements."""

    num_attention_heads: schemas.Heads | None = None
    attention_head_dim: schemas.HeadDim | None = None
    num_layers: schemas.Layers | None = None
    patch_size: schemas.Patch | None = None
    in_channels: schemas.Channels | None = None
    out_channels: schemas.Channels | None = None
    sample_size: schemas.Side | None = None
    num_embeds_ada_norm: schemas.Classes = 1000
    norm_eps: schemas.Epsilon = 1e-5
    norm_num_groups: schemas.Width | None = None
    attention_bias: bool | None = None
    norm_type: Literal["ada_norm_zero"] | None = None
    activation_fn: Literal["gelu-approximate"] | None = None
    norm_elementwise_affine: schemas.No | None = None
    upcast_attention: schemas.No | None = None
    dropout: schemas.Zero | None = None
    cross_attention_dim: None = None
    num_vector_embeds: None = None
    only_cross_attention: schemas.No | None = None
    use_linear_projection: schemas.No | None = None
    double_self_attention: schemas.No | None = None
    # ours: diffusers computes with 1, "interpolate" and its own positions whatever a config says
    freq_shift: schemas.ZeroOrOne | None = None
    pos_scaling: Literal["interpolate", "none", "refuse"] | None = None
    pos_stored: bool | None = None


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Config | None:
    """The config of a DiT's folder, or None for another model's; ValueError for a variant not implemented."""
    if config.get("_class_name") not in ("DiTTransformer2DModel", "Transformer2DModel", LEARNED):
        return None
    read = schemas.checked("a DiT config", config, Fields)
    names = {f.name for f in fields(Config)} & {*Fields.__struct_fields__}
    values: dict[str, Any] = {name: value for name in names if (value := getattr(read, name)) is not None}
    values.setdefault("out_channels", values.get("in_channels", Config.in_channels))
    theirs: dict[str, Any] = {"freq_shift": 1.0, "pos_scaling": "interpolate", "mlp_norm_eps": read.norm_eps}
    values["num_classes"] = read.num_embeds_ada_norm
    found = Config(**theirs | values)
    if found.width % 4 or found.sample_size % found.patch_size:
        sizes = f"width {found.width}, sample_size {found.sample_size} and patch_size {found.patch_size}"
        raise ValueError(f"got a DiT config with {sizes}, expected a multiple of 4, and whole patches")
    check_outputs("DiT", found.in_channels, found.out_channels)
    return found


def key_map(config: Config) -> KeyMap:
    """The keys of diffusers' folders. Each block has a copy of the embedders: the first is read, all must be equal."""
    emb = "transformer_blocks.{}.norm1.emb."
    copied = {
        "t_embedder.0": "timestep_embedder.linear_1",
        "t_embedder.2": "timestep_embedder.linear_2",
        "y_embedder": "class_embedder.embedding_table",
    }
    first = {ours: emb.format(0) + theirs for ours, theirs in copied.items()}
    ends = {"x_embedder": "pos_embed.proj", **first, "final_modulation": "proj_out_1", "final": "proj_out_2"}
    block = {
        "modulation": "norm1.linear",
        "qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "proj": "attn1.to_out.0",
        "fc1": "ff.net.0.proj",
        "fc2": "ff.net.2",
    }
    repeats = {}
    for i in range(1, config.num_layers):
        for theirs in copied.values():
            kinds = ("weight",) if "table" in theirs else ("weight", "bias")
            repeats |= {f"{emb.format(i)}{theirs}.{kind}": f"{emb.format(0)}{theirs}.{kind}" for kind in kinds}
    sources = sources_of(config, ends, "transformer_blocks", block)
    return KeyMap(sources, frozenset({"pos_embed.pos_embed"}), repeats)


def sources_of(
    config: Config, ends: Mapping[str, str], blocks: str, block: Mapping[str, str | tuple[str, ...]]
) -> dict[str, TensorSource]:
    """The sources of all parameters, from name of our layer -> theirs, outside the blocks and inside each."""
    sources = _layers.layers({ours: ends[ours] for ours in ("t_embedder.0", "t_embedder.2", "final_modulation")})
    sources |= _layers.convolution("x_embedder", ends["x_embedder"])
    sources |= _layers.last("final", ends["final"], config.out_channels, config.patch_size)
    sources |= _layers.layers({"y_embedder": ends["y_embedder"]}, kinds=("weight",))
    for i in range(config.num_layers):
        sources |= _layers.layers(block, f"blocks.{i}.", f"{blocks}.{i}.")
        if not config.attention_bias:
            del sources[f"blocks.{i}.qkv.bias"]
    if config.pos_stored:  # a key that `seqpar convert` adds and diffusers does not read
        sources["pos_embed"] = TensorSource(("pos_embed",))
    return sources
