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
from seqpar.loading.keys import KeyMap
from seqpar.loop.interface import Condition, Encoded, SequenceModel
from seqpar.loop.models import _layers, _uvit_files
from seqpar.types.facts import Blocks, Work
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
        """Return E, the width of the model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def time_tokens(self) -> int:
        """Return the tokens of the stream "time": one a timestep, and one for the kind of data."""
        return 2 + self.data_type

    @property
    def lengths(self) -> dict[str, int]:
        """Return the tokens of each stream at the trained image size, in the order of the sequence."""
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
        """Return this rank's tokens after the block, written into `out_BlE` if that is given."""
        stream = Projected(x_BlE, self.qkv.weight, self.qkv.bias, self.heads, self.heads, Prepare())
        (attended,) = attend((stream,))
        h_BlE = post_norm(x_BlE, self.proj(attended.flatten(2)), _affine(self.attention_norm))
        branch = self.fc2(linear_gelu(h_BlE, self.fc1.weight, self.fc1.bias, exact=True))
        return post_norm(h_BlE, branch, _affine(self.mlp_norm), out_BlE)

    def joined(self, pair_Bl2E: Tensor) -> Tensor:
        """Return the block's input from the previous block's output and the skip connection, side by side."""
        return post_norm(self.skip(pair_Bl2E), None, _affine(self.skip_norm))


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
        """Return the learned rows of each stream, (L, E); for another image size, its rows are resized (bilinear).

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
        """Return the stream "time": the number of each of its tokens, (R, 2 or 3), by which a rank finds its own."""
        count = len(next(iter(prompt.values()))) if prompt else 1
        numbers = torch.arange(self.config.time_tokens, device=self.pos_embed.device)
        return Encoded({"time": numbers.expand(count, -1)}, pooled=prompt)

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Return {"time": (R, 2 or 3, E)}, the tokens of the image's and the text's timestep and of the kind of data.

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
        """Return the predictions of the streams of the state; see `SequenceModel.forward_tokens`."""
        x_BlE = self._blocks(self._embedded(streams, positions, conditioning["time"]), attend)
        parts = x_BlE.split([streams[name].shape[1] for name in self.STREAMS], dim=1)
        found = {name: part for name, part in zip(self.STREAMS, parts, strict=True) if name in self.STATE}
        # the norm of a part makes it contiguous, as the product needs it
        return {name: self.final[name](post_norm(x, None, _affine(self.final_norm))) for name, x in found.items()}

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the prompt of the unconditional branch, in which the other modality is noise."""
        if not self._conditional:
            raise ValueError(f"got guidance in mode {self.config.mode}, expected text2img or img2text; use scale 1")
        return {**prompt, "other_timestep": torch.full_like(prompt["other_timestep"], NOISE)}

    @property
    def _conditional(self) -> bool:
        return self.config.mode in ("text2img", "img2text")

    def _embedded(self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], time_BnE: Tensor) -> Tensor:
        """Return this rank's tokens of all streams with their positions, (B, l, E)."""
        dtype, numbers_Bl = self.pos_embed.dtype, streams["time"]
        tokens = time_BnE.gather(1, numbers_Bl[..., None].expand(-1, -1, self.config.width))
        others = [self.into[name](streams[name].to(dtype)) for name in self.STREAMS[1:]]
        x_BlE = torch.cat([tokens.to(dtype), *others], dim=1)
        return x_BlE + torch.cat([positions[name].to(dtype) for name in self.STREAMS])

    def _blocks(self, x_BlE: Tensor, attend: Attend) -> Tensor:
        """Run all blocks.

        A pair holds the input of a block of the second half, on the left, beside the skip connection. The blocks write
        their outputs there, and those of the first half read theirs from there.
        """
        batch, tokens, width = x_BlE.shape
        pairs_Bl2E: list[Tensor] = []
        for block in self.first:
            pairs_Bl2E.append(x_BlE.new_empty(batch, tokens, 2 * width))
            x_BlE = block(x_BlE, attend, pairs_Bl2E[-1][..., width:])
        x_BlE = self.middle(x_BlE, attend, _left(pairs_Bl2E))
        blocks: Sequence[Any] = list(self.second)
        for block in blocks:
            h_BlE = block.joined(pairs_Bl2E.pop())
            x_BlE = block(h_BlE, attend, _left(pairs_Bl2E))
        return x_BlE


def _left(pairs_Bl2E: Sequence[Tensor]) -> Tensor | None:
    """Return the place of the next output: the left half of the last pair, or None after all of them."""
    return pairs_Bl2E[-1].chunk(2, dim=-1)[0] if pairs_Bl2E else None


def _affine(norm: nn.LayerNorm) -> Affine:
    return Affine(norm.weight, norm.bias, norm.eps)


def work(config: Config) -> Work:
    """Return the planner's `Work`: a norm moves 3 E a token (2 E without a sum), bias and GELU 8 E."""
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


PRESETS: dict[str, Config] = {"unidiffuser-v0": Config(), "unidiffuser-v1": Config(data_type=True)}


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Config | None:
    """Return the config of diffusers' folder, or None for another model's; ValueError for another variant."""
    return Config(**_uvit_files.sizes(config)) if config.get("_class_name") == "UniDiffuserModel" else None


def key_map(config: Config) -> KeyMap:
    """Return the key map of diffusers' folders."""
    return _uvit_files.key_map(config.num_layers // 2, config.out_channels, config.patch_size, config.data_type)
