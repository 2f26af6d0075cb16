"""U-ViT of UniDiffuser (v0 and v1): one transformer over time, text, CLIP-image and image tokens, with long skips.

It has no adaLN and no cross-attention: timesteps are tokens, and attention joins all tokens. Each block's LayerNorms
stand after its residual sums. The inputs of the second half of the blocks are joined with the outputs of the first half
in reverse order, token by token, so skips need no communication. One set of weights serves all modes
(`Config.mode`), which differ in the streams that are denoised. The original code computes attention in fp32; here
its sums are fp32, and its inputs have the dtype of the model.
Source: UniDiffuser (arXiv 2303.06555), U-ViT (arXiv 2209.12152).
Letters: see `seqpar.types.protocols`; E = heads * head dim, F = 4 E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.kernels.linear import linear_gelu
from seqpar.kernels.post_norm import Affine, post_norm
from seqpar.loading import schemas
from seqpar.loop.interface import Condition, Encoded, SequenceModel
from seqpar.loop.models import _layers
from seqpar.types.facts import Blocks, Work
from seqpar.types.keys import KeyMap, TensorSource
from seqpar.types.protocols import Attend, Prepare, Projected, state_dtype

NOISE = 1000  # the timestep at which a modality is pure noise, so that the prediction does not depend on it

Mode = Literal["text2img", "img2text", "joint", "image", "text"]
_IMAGE, _TEXT = ("image", "clip"), ("text",)
_STATES: Mapping[str, tuple[str, ...]] = {
    "text2img": _IMAGE,
    "img2text": _TEXT,
    "joint": (*_IMAGE, *_TEXT),
    "image": _IMAGE,
    "text": _TEXT,
}


@dataclass(frozen=True)
class Config:
    """Sizes of a UniDiffuser U-ViT, named as in diffusers where it has them; the defaults are those of version 0.

    num_layers: the blocks of both halves; one more lies between them. clip_width: width of a CLIP image embedding,
    which is one token. data_type: whether there is a token that tells the kind of training data (version 1).
    mode: the streams that are denoised, and where the timestep of the others comes from: the prompt's `other_timestep`
    (text2img, img2text), `NOISE` (image, text: no condition), or the timestep itself (joint).
    """

    num_attention_heads: int = 24
    attention_head_dim: int = 64
    num_layers: int = 30
    sample_size: int = 64
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 4
    text_tokens: int = 77
    text_width: int = 64
    clip_width: int = 512
    data_type: bool = False
    mode: Mode = "text2img"

    def __post_init__(self) -> None:
        if self.mode not in _STATES:
            raise ValueError(f"got mode {self.mode!r}, expected one of {', '.join(_STATES)}")
        if self.sample_size % self.patch_size or self.width % 2:
            sizes = f"sample_size {self.sample_size}, patch_size {self.patch_size} and width {self.width}"
            raise ValueError(f"got {sizes}, expected a multiple of the patch size and an even width")

    @property
    def width(self) -> int:
        """E, the width of the model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def time_tokens(self) -> int:
        """The tokens of the stream "time": one a timestep, and one for the kind of data."""
        return 2 + self.data_type

    @property
    def lengths(self) -> dict[str, int]:
        """The tokens of each stream at the trained image size, in the order of the sequence."""
        patches = (self.sample_size // self.patch_size) ** 2
        return {"time": self.time_tokens, "text": self.text_tokens, "clip": 1, "image": patches}


class Block(nn.Module):
    """Attention and MLP with LayerNorms after the residual sums; skips: whether a skip connection joins its input."""

    def __init__(self, config: Config, skips: bool = False) -> None:
        super().__init__()
        width, self.heads = config.width, config.num_attention_heads
        if skips:
            self.skip, self.skip_norm = nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj, self.attention_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc1, self.fc2, self.mlp_norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x_BlE: Tensor, attend: Attend, out_BlE: Tensor | None) -> Tensor:
        """This rank's tokens after the block, written into `out_BlE` if that is given."""
        stream = Projected(x_BlE, self.qkv.weight, self.qkv.bias, self.heads, self.heads, Prepare())
        (attended,) = attend((stream,))
        h_BlE = post_norm(x_BlE, self.proj(attended.flatten(2)), _affine(self.attention_norm))
        branch = self.fc2(linear_gelu(h_BlE, self.fc1.weight, self.fc1.bias, exact=True))
        return post_norm(h_BlE, branch, _affine(self.mlp_norm), out_BlE)


class Model(SequenceModel):
    """The U-ViT. Streams that are not denoised come with every step (`Request.drawn`); "time" comes from `encode`.

    The prompt has the timestep of the modality that is not denoised (`other_timestep`: 0 if it is given as it is, 1000
    if it is noise) and in version 1 the kind of data (`data_type`: 1 for the data that version 1 was continued on,
    else 0), each (R,).
    """

    STREAMS = ("time", "text", "clip", "image")
    PROMPT = ("other_timestep", "data_type")  # an instance has those of its mode and version
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, width, area = config, config.width, config.patch_size**2
        self.STATE = _STATES[config.mode]
        self.PROMPT = (*(["other_timestep"] if self._conditional else []), *(["data_type"] if config.data_type else []))
        inputs = {"text": config.text_width, "clip": config.clip_width, "image": config.in_channels * area}
        outputs = {**inputs, "image": config.out_channels * area}
        self.into = nn.ModuleDict({name: nn.Linear(size, width) for name, size in inputs.items()})
        self.final = nn.ModuleDict({name: nn.Linear(width, size) for name, size in outputs.items()})
        self.pos_embed = nn.Parameter(torch.empty(sum(config.lengths.values()), width))
        if config.data_type:
            self.data_types = nn.Embedding(2, width)
        half = config.num_layers // 2
        self.first = nn.ModuleList(Block(config) for _ in range(half))
        self.middle = Block(config)
        self.second = nn.ModuleList(Block(config, skips=True) for _ in range(half))
        self.final_norm = nn.LayerNorm(width)

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """The learned rows of each stream, (L, E); for another image size, its rows are resized (bilinear).

        size: (height, width) of the latent; any other tuple means the trained size.
        """
        trained = self.config.lengths
        rows = dict(zip(self.STREAMS, self.pos_embed.detach().split([*trained.values()]), strict=True))
        base = self.config.sample_size // self.config.patch_size
        grid = tuple(side // self.config.patch_size for side in size) if len(size) == 2 else (base, base)
        if grid != (base, base):
            wide_1EHW = rows["image"].to(state_dtype(self.pos_embed.dtype)).T.unflatten(1, (base, base))[None]
            resized = F.interpolate(wide_1EHW, grid, mode="bilinear")[0].flatten(1).T
            rows["image"] = resized.to(self.pos_embed.dtype)
        for name, length in lengths.items():
            if len(rows[name]) != length:
                raise ValueError(f"got {length} tokens of {name}, expected {len(rows[name])}")
        return rows

    def encode(self, **prompt: Tensor) -> Encoded:
        """The stream "time": the number of each of its tokens, (R, 2 or 3), by which a rank finds its own."""
        count = len(next(iter(prompt.values()))) if prompt else 1
        numbers = torch.arange(self.config.time_tokens, device=self.pos_embed.device)
        return Encoded({"time": numbers.expand(count, -1)}, pooled=prompt)

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Compute {"time": (R, 2 or 3, E)}, the tokens of the image's and the text's timestep and of the kind of data.

        In fp32 (fp64 for an fp64 model), without positions. There is no MLP.
        """
        other = pooled.get("other_timestep", t_R if self.config.mode == "joint" else torch.full_like(t_R, NOISE))
        image, text = (t_R, other) if "image" in self.STATE else (other, t_R)
        wide = state_dtype(self.pos_embed.dtype)
        rows = [_layers.sinusoid(t, self.config.width).to(wide) for t in (image, text)]
        if self.config.data_type:
            rows.append(self.data_types(pooled["data_type"]).to(wide))
        return {"time": torch.stack(rows, dim=1)}

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        # 1. this rank's tokens of all streams, with their positions
        dtype, numbers_Bl = self.pos_embed.dtype, streams["time"]
        time = conditioning["time"].gather(1, numbers_Bl[..., None].expand(-1, -1, self.config.width)).to(dtype)
        tokens = [time, *(self.into[name](streams[name].to(dtype)) for name in self.STREAMS[1:])]
        x_BlE = torch.cat(tokens, dim=1) + torch.cat([positions[name].to(dtype) for name in self.STREAMS])
        del time, tokens  # the blocks need their memory

        # 2. the blocks. A pair holds the input of a block of the second half, on the left, and the skip connection.
        # Blocks write their outputs there, and those of the first half read their inputs from there.
        pairs_Bl2E: list[Tensor] = []
        for block in self.first:
            pairs_Bl2E.append(x_BlE.new_empty(*x_BlE.shape[:2], 2 * self.config.width))
            x_BlE = block(x_BlE, attend, pairs_Bl2E[-1][..., self.config.width :])
        x_BlE = self.middle(x_BlE, attend, _left(pairs_Bl2E))
        second: list[Any] = list(self.second)
        for block in second:
            h_BlE = post_norm(block.skip(pairs_Bl2E.pop()), None, _affine(block.skip_norm))
            x_BlE = block(h_BlE, attend, _left(pairs_Bl2E))

        # 3. predictions of the state; the norm of a part makes it contiguous, as the product needs it
        parts = zip(self.STREAMS, x_BlE.split([streams[name].shape[1] for name in self.STREAMS], dim=1), strict=True)
        norm = _affine(self.final_norm)
        return {name: self.final[name](post_norm(x, None, norm)) for name, x in parts if name in self.STATE}

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # in the unconditional branch, the other modality is noise
        if not self._conditional:
            raise ValueError(f"got guidance in mode {self.config.mode}, expected text2img or img2text; use scale 1")
        return {**prompt, "other_timestep": torch.full_like(prompt["other_timestep"], NOISE)}

    @property
    def _conditional(self) -> bool:
        return self.config.mode in ("text2img", "img2text")


def _left(pairs_Bl2E: Sequence[Tensor]) -> Tensor | None:
    # the place of the next output
    return pairs_Bl2E[-1].chunk(2, dim=-1)[0] if pairs_Bl2E else None


def _affine(norm: nn.LayerNorm) -> Affine:
    return Affine(norm.weight, norm.bias, norm.eps)


def work(config: Config) -> Work:
    # passes: a norm moves 3 E per token (2 E without a sum), bias and GELU 8 E
    width, area, half = config.width, config.patch_size**2, config.num_layers // 2
    gemms = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    passes = (3 * width, 3 * width, 8 * width)
    joined = Blocks(half, (*gemms, (2 * width, width)), (*passes, 2 * width))
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        blocks=(Blocks(half + 1, gemms, passes), joined),
        prepares=False,
        once=((config.in_channels * area, width), (width, config.out_channels * area)),
        table=config.time_tokens * width,
        live=(8 + 2 * half) * width,
        text=((config.text_width, width),),
        guided=config.mode in ("text2img", "img2text"),
        joined=tuple(length for name, length in config.lengths.items() if name != "image"),
    )


SIZES: dict[str, Config] = {"unidiffuser-v0": Config(), "unidiffuser-v1": Config(data_type=True)}


# Checkpoints ---------------------------------------------------------------------------------------------------

DATA_TYPE = "use_data_type_embedding"

COPIED = {  # diffusers' name of a size -> ours
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "num_layers": "num_layers",
    "in_channels": "in_channels",
    "sample_size": "sample_size",
    "patch_size": "patch_size",
    "num_text_tokens": "text_tokens",
    "text_dim": "text_width",
    "clip_img_dim": "clip_width",
    DATA_TYPE: "data_type",
}
UNUSED = ("out_channels", "norm_num_groups", "num_embeds_ada_norm", "ff_final_dropout")


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of diffusers' config, with its defaults, and with the values that the model implements."""

    num_attention_heads: schemas.Heads = 16
    attention_head_dim: schemas.HeadDim = 88
    num_layers: schemas.Layers = 1
    in_channels: schemas.Channels
    sample_size: schemas.Side
    patch_size: schemas.Patch
    num_text_tokens: schemas.Tokens = 77
    text_dim: schemas.Width = 768
    clip_img_dim: schemas.Width = 512
    use_data_type_embedding: bool = False
    activation_fn: Literal["gelu"]  # diffusers' default is another one
    out_channels: schemas.Channels | None = None
    attention_bias: schemas.No = False
    block_type: Literal["unidiffuser"] = "unidiffuser"
    cross_attention_dim: None = None
    dropout: schemas.Zero = 0.0
    norm_elementwise_affine: schemas.Yes = True
    norm_type: Literal["layer_norm"] = "layer_norm"
    num_vector_embeds: None = None
    only_cross_attention: schemas.No = False
    pre_layer_norm: schemas.No = False
    upcast_attention: schemas.No = False
    use_linear_projection: schemas.No = False
    use_patch_pos_embed: schemas.No = False
    use_timestep_embedding: schemas.No = False
    # these have no effect
    norm_num_groups: schemas.Width | None = None
    num_embeds_ada_norm: schemas.Classes | None = None
    ff_final_dropout: bool | None = None


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Config | None:
    """The config of diffusers' folder, or None for another model's; ValueError for another variant."""
    if config.get("_class_name") != "UniDiffuserModel":
        return None
    read = schemas.checked("a UniDiffuser config", config, Fields)
    sizes = {ours: getattr(read, theirs) for theirs, ours in COPIED.items()}
    return Config(**sizes, out_channels=read.out_channels or read.in_channels)


def key_map(config: Config) -> KeyMap:
    """The keys of diffusers' folders, which have an unused copy of the patch convolution."""
    ends = {"final_norm": "transformer.norm_out", "into.image": "vae_img_in.proj", "final.image": "vae_img_out"}
    ends |= {"into.text": "text_in", "final.text": "text_out", "into.clip": "clip_img_in", "final.clip": "clip_img_out"}
    sources = ends_of(config, ends, ("data_type_pos_embed_token", "data_type_token_embedding"))
    block = {"proj": "attn1.to_out.0", "attention_norm": "norm1", "mlp_norm": "norm3"}
    block |= {"fc1": "ff.net.0.proj", "fc2": "ff.net.2"}
    prefixes = {"middle.": "transformer.transformer_mid_block."}
    for i in range(config.num_layers // 2):
        second = f"transformer.transformer_out_blocks.{i}."
        prefixes |= {f"first.{i}.": f"transformer.transformer_in_blocks.{i}.", f"second.{i}.": f"{second}block."}
        sources |= _layers.layers({"skip": "skip.skip_linear", "skip_norm": "skip.norm"}, f"second.{i}.", second)
    for ours, theirs in prefixes.items():
        sources |= _layers.layers({"qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v")}, ours, theirs, ("weight",))
        sources |= _layers.layers(block, ours, theirs)
    unused = frozenset(f"transformer.pos_embed.proj.{kind}" for kind in ("weight", "bias"))
    return KeyMap(sources, ignored=unused)


def ends_of(config: Config, ends: Mapping[str, str], data_type: tuple[str, str]) -> dict[str, TensorSource]:
    """The sources of the parameters outside the blocks, from name of our layer -> theirs.

    data_type: the position of the data-type token, which version 1 keeps apart, and its table.
    """
    sources = _layers.layers(ends) | _layers.convolution("into.image", ends["into.image"])
    sources |= _layers.last("final.image", ends["final.image"], config.out_channels, config.patch_size)
    if not config.data_type:
        return sources | {"pos_embed": TensorSource(("pos_embed",), lambda positions: positions[0])}

    def with_data_type(positions_1LE: Tensor, token_11E: Tensor) -> Tensor:  # after the two timesteps
        return torch.cat((positions_1LE[0, :2], token_11E[0], positions_1LE[0, 2:]))

    position, table = data_type
    sources["pos_embed"] = TensorSource(("pos_embed", position), with_data_type)
    return sources | _layers.layers({"data_types": table}, kinds=("weight",))
