"""FLUX.1 (dev and schnell): a text-to-image transformer of double blocks over text and image, then single blocks.

It loads diffusers' `FluxTransformer2DModel` from a folder or an object. A double block has its own layers for each of
the two streams; before the single blocks, the tokens of a rank become one stream, text first. The arithmetic is that of
diffusers with fewer roundings: norms, rotary embedding, gates and modulation are computed in fp32 and rounded once.
Source: Black Forest Labs' FLUX.1, as diffusers implements it.
Letters: see `seqpar.types.protocols`; E = heads * head dim, F = 4 E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gelu import linear_gelu
from seqpar.models import _flux_files
from seqpar.models._flux_conditioning import FREQUENCIES, Conditioned
from seqpar.types.facts import Blocks, Work
from seqpar.types.keys import KeyMap
from seqpar.types.protocols import Attend, Condition, Encoded, Given, Prepare, Projected

NORM = Norm("layer", 1e-6)  # every block norm and the final one
QK_EPS = 1e-6
THETA = 10000.0

After = tuple[Tensor, Tensor, Norm]
"""Shift, scale and norm of what follows a gated branch, because one kernel computes both."""


@dataclass(frozen=True)
class Config:
    """Sizes of a FLUX.1, named as in diffusers; the defaults are those of FLUX.1-schnell.

    in_channels and out_channels count the channels of the latent: a quarter of those in diffusers' config, which counts
    the values of a patch. axes_dims_rope: the part of the head dim that each of the three position ids rotates.
    guidance_embeds: whether the guidance scale is an input (FLUX.1-dev).
    """

    num_layers: int = 19
    num_single_layers: int = 38
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    patch_size: int = _flux_files.PATCH
    in_channels: int = 16
    out_channels: int = 16
    sample_size: int = 128

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_single_layers) < 1:
            layers = f"{self.num_layers} double and {self.num_single_layers} single blocks"
            raise ValueError(f"got {layers}, expected at least one of each")
        axes, dim = self.axes_dims_rope, self.attention_head_dim
        if len(axes) != 3 or sum(axes) != dim or any(part % 2 for part in axes):
            raise ValueError(f"got axes_dims_rope {axes}, expected three even numbers with sum {dim}, the head dim")

    @property
    def width(self) -> int:
        """Return E, the width of the model."""
        return self.num_attention_heads * self.attention_head_dim


def rotary(ids_L3: Tensor, config: Config) -> Tensor:
    """Return the rotary rows (L, D): the cosines of all pairs, then their sines, in fp32; angles are fp64.

    ids_L3: the position of each token on three axes. In a pipeline these are `txt_ids` (zeros) and `img_ids` (0, row,
    column). Each axis rotates its own part of the head dim (`axes_dims_rope`).
    """
    axes = config.axes_dims_rope
    exponents = [torch.arange(0, dim, 2, dtype=torch.float64, device=ids_L3.device) / dim for dim in axes]
    positions = ids_L3.float().double().unbind(-1)
    angles = [torch.outer(x, 1.0 / THETA**part) for x, part in zip(positions, exponents, strict=True)]
    angles_LD2 = torch.cat(angles, dim=-1)
    return torch.cat((angles_LD2.cos(), angles_LD2.sin()), dim=-1).float()


class Attention(nn.Module):
    """The layers that make a stream's q, k and v: modulation, one fused projection, and a norm of each head."""

    def __init__(self, config: Config, modulations: int) -> None:
        super().__init__()
        width, self.heads, dim = config.width, config.num_attention_heads, config.attention_head_dim
        self.modulation = nn.Linear(width, modulations * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, QK_EPS), nn.RMSNorm(dim, QK_EPS)
        self.fc1 = nn.Linear(width, 4 * width)

    def prepare(self, rows_lD: Tensor) -> Prepare:
        """Return the preparation of q and k: RMSNorm of each head, then rotary on neighbouring pairs."""
        cos, sin = rows_lD.chunk(2, dim=-1)
        return Prepare("rms", True, QK_EPS, self.q_norm.weight, None, self.k_norm.weight, None, cos, sin)

    def mlp(self, h_BlE: Tensor) -> Tensor:
        """Return the first layer of the MLP with GELU, (B, l, F)."""
        return linear_gelu(h_BlE, self.fc1.weight, self.fc1.bias)


class Part(Attention):
    """The layers of a double block for one of its two streams."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 6)
        width = config.width
        self.proj = nn.Linear(width, width)
        self.fc2 = nn.Linear(4 * width, width)

    def stream(self, h_BlE: Tensor, rows_lD: Tensor) -> Projected:
        """Return the stream as attention's input."""
        return Projected(h_BlE, self.qkv.weight, self.qkv.bias, self.heads, self.heads, self.prepare(rows_lD))

    def forward(self, x_BlE: Tensor, out_BlHD: Tensor, modulation_B6E: Tensor, after: After) -> tuple[Tensor, Tensor]:
        """Return the stream x after attention and MLP, and its normalised, modulated form for what follows."""
        if not x_BlE.shape[1]:  # a text may have fewer tokens than there are ranks
            return x_BlE, x_BlE
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation_B6E.unbind(1)
        x, h = gate_norm_modulate(x_BlE, gate, self.proj(out_BlHD.flatten(2)), shift_mlp, scale_mlp, NORM)
        return _bounded(*gate_norm_modulate(x, gate_mlp, self.fc2(self.mlp(h)), *after))


class Double(nn.Module):
    """A double block: two streams with their own layers, which attend to both."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.text, self.image = Part(config), Part(config)

    @property
    def parts(self) -> tuple[Part, Part]:
        """Return the layers of each stream, in the order of `Model.STREAMS`."""
        return self.text, self.image


class Single(Attention):
    """A single block: attention and MLP side by side, from the same input into the same gated branch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 3)
        self.out = nn.Linear(5 * config.width, config.width)  # the columns of attention, then those of the MLP

    def forward(self, h_BlE: Tensor, prepare: Prepare, attend: Attend) -> Tensor:
        """Return the branch (B, l, E), which the caller gates and adds.

        The MLP does not read attention's output, so it runs while keys and values travel. Its product and that of
        attention's output add up in one buffer, so the two inputs are never concatenated.
        """
        width = h_BlE.shape[-1]
        q, k, v = self.qkv(h_BlE).unflatten(-1, (3, self.heads, -1)).unbind(2)
        of_attention, of_mlp = self.out.weight.split((width, 4 * width), dim=1)
        made: list[Tensor] = []
        (out,) = attend(
            (Given(q, k, v, prepare),), beside=lambda: made.append(F.linear(self.mlp(h_BlE), of_mlp, self.out.bias))
        )
        (branch_BlE,) = made
        branch_BlE.view(-1, width).addmm_(out.reshape(-1, width), of_attention.t())
        return branch_BlE


class Model(Conditioned):
    """The FLUX.1 model. Its prompt is T5's hidden states and CLIP's pooled vector; no token is masked."""

    STREAMS = ("text", "image")
    PROMPT = ("encoder_hidden_states", "pooled_projections")
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config, lambda: Double(config), lambda: Single(config))
        width, area = config.width, config.patch_size**2
        self.x_embedder = nn.Linear(config.in_channels * area, width)
        self.context_embedder = nn.Linear(config.joint_attention_dim, width)
        self.final = nn.Linear(width, config.out_channels * area)

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the rotary rows of both streams: text tokens are at (0, 0, 0), image tokens at (0, row, column)."""
        (height, width), device = (side // self.config.patch_size for side in size), self.x_embedder.weight.device
        axes = (torch.arange(n, device=device) for n in (1, height, width))
        image, text = torch.cartesian_prod(*axes), torch.zeros(lengths["text"], 3, device=device)
        return {"text": rotary(text, self.config), "image": rotary(image, self.config)}

    def encode(self, **prompt: Tensor) -> Encoded:
        """Return the projected text as the stream "text", and the pooled vector for `modulate`."""
        text, pooled = (prompt[name].to(self.context_embedder.weight.dtype) for name in self.PROMPT)
        return Encoded({"text": self.context_embedder(text)}, pooled={"pooled_projections": pooled})

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        """Return {"image": predictions}; see `SequenceModel.forward_tokens`. The text comes from `encode`."""
        if (reason := why_not_autocast(streams["image"].device, self.dtype)) is not None:
            raise ValueError(
                f"got a FLUX.1 to run under autocast, expected none: {reason}; convert the weights instead"
            )
        image = self.x_embedder(streams["image"].to(self.x_embedder.weight.dtype))
        x, h = self._double((streams["text"], image), positions, conditioning, attend)
        modulations, (scale, shift) = conditioning["single"].unbind(1), conditioning["final"].unbind(1)
        rows_lD, text = torch.cat([positions[name] for name in self.STREAMS]), streams["text"].shape[1]
        blocks: list[Any] = list(self.single)
        for index, (block, modulation) in enumerate(zip(blocks, modulations, strict=True), start=1):
            branch, gate = block(h, block.prepare(rows_lD), attend), modulation[:, 2]
            if index < len(blocks):
                x, h = _bounded(*gate_norm_modulate(x, gate, branch, *_start(modulations[index])))
            else:  # only the image is predicted
                after = shift, scale, NORM
                _, h = gate_norm_modulate(x[:, text:], gate, branch[:, text:], *after, keep=False)
        return {"image": self.final(h)}

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raise `ValueError`: only the text encoders can make the embeddings of an empty prompt."""
        raise ValueError("got classifier-free guidance without a negative prompt, expected its embeddings as negative")

    def _double(
        self, x: Sequence[Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the double blocks on (text, image); return x and h of both as one stream for the single blocks."""
        modulations = [rows.unbind(1) for rows in conditioning["blocks"].unbind(1)]
        starts = [[_start(rows) for rows in pair] for pair in modulations]
        ends = [*starts[1:], [_start(conditioning["single"][:, 0])] * 2]
        rotary_rows = [positions[name] for name in self.STREAMS]
        h = [norm_modulate(tokens, *start) for tokens, start in zip(x, starts[0], strict=True)]
        blocks: list[Any] = list(self.blocks)
        for block, pair, after in zip(blocks, modulations, ends, strict=True):
            parts: tuple[Part, Part] = block.parts
            outs = attend([part.stream(*given) for part, *given in zip(parts, h, rotary_rows, strict=True)])
            made = [part(*given) for part, *given in zip(parts, x, outs, pair, after, strict=True)]
            x, h = zip(*made, strict=True)
        return torch.cat([*x], dim=1), torch.cat([*h], dim=1)


def work(config: Config) -> Work:
    """Return the planner's `Work`: a gated norm moves 4 E a token, and GELU is part of its product."""
    width, area = config.width, config.patch_size**2
    sines = ((FREQUENCIES, width), (width, width)) * (2 if config.guidance_embeds else 1)
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        blocks=_blocks(width, config.num_layers, config.num_single_layers),
        prepares=True,
        once=((config.in_channels * area, width), (width, config.out_channels * area)),
        table=(12 * config.num_layers + 3 * config.num_single_layers + 2) * width,
        live=12 * width,
        text=((config.joint_attention_dim, width),),
        conditioning=(*sines, (config.pooled_projection_dim, width), (width, width), (width, 2 * width)),
        guided=False,
        joined=(512,),
    )


def _blocks(width: int, doubles: int, singles: int) -> tuple[Blocks, Blocks]:
    """Return double and single blocks; the output of a single block takes 2 E more, because two products add up."""
    hidden = 4 * width
    gemms = ((width, 3 * width), (width, width), (width, hidden), (hidden, width))
    modulation = ((width, 6 * width),) * 2
    double = Blocks(doubles, gemms, passes=(4 * width, 4 * width), apart=(gemms,), modulation=modulation)
    single = Blocks(
        count=singles,
        gemms=((width, 3 * width), (width, hidden), (width + hidden, width)),
        passes=(6 * width,),
        modulation=((width, 3 * width),),
        beside=((width, hidden), (hidden, width)),
    )
    return double, single


PRESETS: dict[str, Config] = {"flux.1-dev": Config(guidance_embeds=True), "flux.1-schnell": Config()}


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None) -> tuple[Config, str] | None:
    """Return (config, key map name) for diffusers' FLUX.1, else None; `ValueError` for a variant not implemented."""
    if config is None or config.get("_class_name") != "FluxTransformer2DModel":
        return None
    return Config(**_flux_files.sizes(config)), "diffusers"


def _diffusers_keys(config: Config) -> KeyMap:
    return _flux_files.key_map(config.num_layers, config.num_single_layers, config.guidance_embeds)


KEY_MAPS = {"diffusers": _diffusers_keys}


def why_not_autocast(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model with weights of this dtype cannot compute under the caller's autocast, or None if it can."""
    wanted = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    if dtype in (wanted, torch.float64):  # autocast leaves fp64 as it is
        return None
    return f"autocast asks for {wanted}, and the native model computes in the dtype of its weights, {dtype}"


def _start(modulation_BNE: Tensor) -> After:
    """Return shift, scale and norm of the input of a block."""
    return modulation_BNE[:, 0], modulation_BNE[:, 1], NORM


def _bounded(x_BlE: Tensor, h_BlE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stream and its normalised form; as in diffusers, an fp16 stream is kept finite."""
    if x_BlE.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        x_BlE = x_BlE.clamp(-largest, largest)
    return x_BlE, h_BlE
