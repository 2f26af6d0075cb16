"""A toy text-to-image model of two-stream blocks, as one file of `seqpar/loop/models` would be.

Text and image have their own projections, norms and rotary rows, and attend to both. states: whether a stream of one
token, which is no latent, is denoised too. fresh: whether the text comes with every step instead of once a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.loop.interface import Condition, Encoded, SequenceModel
from seqpar.loop.models import _layers
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Attend, Prepare, Projected

TEXT, TOKEN = 6, 12  # widths of the text and of the token that is denoised together with the latent


@dataclass(frozen=True)
class Config:
    """The sizes of a model of a few thousand weights."""

    num_attention_heads: int = 3
    attention_head_dim: int = 8
    num_layers: int = 2
    patch_size: int | tuple[int, int, int] = 2
    in_channels: int = 4
    out_channels: int = 4
    sample_size: int = 8
    states: bool = False
    fresh: bool = False

    @property
    def width(self) -> int:
        """The model width E."""
        return self.num_attention_heads * self.attention_head_dim


class Part(nn.Module):
    """The layers of a block for one of its streams."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.num_attention_heads
        self.modulation = nn.Linear(width, 3 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.Parameter(torch.ones(config.attention_head_dim))
        self.k_norm = nn.Parameter(torch.ones(config.attention_head_dim))
        self.out = nn.Linear(width, width)

    def stream(self, x: Tensor, modulation_B3E: Tensor, rotary: Tensor) -> Projected:
        """Return the stream as attention's input."""
        shift, scale, _ = modulation_B3E.unbind(1)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]
        cos, sin = rotary.chunk(2, dim=-1)
        how = Prepare("rms", True, 1e-6, self.q_norm, None, self.k_norm, None, cos, sin)
        return Projected(h, self.qkv.weight, self.qkv.bias, self.heads, self.heads, how)


class Model(SequenceModel):
    """The model that the module's docstring describes."""

    PROMPT = ("text", "pooled")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.STREAMS = ("text", "image", *(["token"] if config.states else []))
        self.STATE = self.STREAMS[1:]
        self.PROMPT = ("pooled",) if config.fresh else Model.PROMPT
        width = config.width
        patch = self.patch[0] * self.patch[1] * self.patch[2]
        self.into = nn.ModuleDict(
            {"text": nn.Linear(TEXT, width), "image": nn.Linear(4 * patch, width), "token": nn.Linear(TOKEN, width)}
        )
        self.pooled, self.time = nn.Linear(TEXT, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: Part(config) for name in self.STREAMS}) for _ in range(config.num_layers)
        )
        self.final = nn.ModuleDict({"image": nn.Linear(width, 4 * patch), "token": nn.Linear(width, TOKEN)})

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        starts, dim = {"text": 100.0, "image": 0.0, "token": 50.0}, self.config.attention_head_dim
        found = {}
        for name, length in lengths.items():
            index = torch.arange(length, device=self.pooled.weight.device) + starts[name]
            angles = torch.outer(index, 1.0 / 10.0 ** torch.linspace(0, 2, dim // 2, device=index.device))
            found[name] = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return found

    def encode(self, **prompt: Tensor) -> Encoded:
        if self.config.fresh:
            return Encoded(pooled=prompt)
        text = self.into["text"](prompt["text"].to(self.pooled.weight.dtype))
        return Encoded({"text": text}, {"pooled": prompt["pooled"]})

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Return the modulation (R, layers, streams, 3, E)."""
        dtype, width = self.pooled.weight.dtype, self.config.width
        c = self.time(_layers.sinusoid(t_R, width).to(dtype)) + self.pooled(pooled["pooled"].to(dtype))
        parts: list[Any] = [[block.get_submodule(name) for name in self.STREAMS] for block in self.blocks]
        made = [torch.stack([part.modulation(F.silu(c)) for part in row], dim=1) for row in parts]
        return {"blocks": torch.stack(made, dim=1).unflatten(-1, (3, -1))}

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        dtype = self.pooled.weight.dtype
        ready = () if self.config.fresh else ("text",)
        x = {
            name: streams[name] if name in ready else self.into[name](streams[name].to(dtype)) for name in self.STREAMS
        }
        for block, modulation in zip(self.blocks, conditioning["blocks"].unbind(1), strict=True):
            parts: list[Any] = [block.get_submodule(name) for name in self.STREAMS]
            rows = [modulation[:, index] for index in range(len(parts))]
            given = [
                part.stream(x[name], row, positions[name])
                for name, part, row in zip(self.STREAMS, parts, rows, strict=True)
            ]
            outputs = attend(tuple(given))
            for name, part, row, out in zip(self.STREAMS, parts, rows, outputs, strict=True):
                x[name] = x[name] + row[:, 2, None] * part.out(out.flatten(2))
        return {name: self.final[name](x[name]) for name in self.STATE}

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(x) for name, x in prompt.items()}


def work(config: Config) -> Work:
    """Return the cost of a token for the planner."""
    width, gemms = config.width, ((config.width, 3 * config.width), (config.width, config.width))
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        blocks=(Blocks(config.num_layers, gemms, (4 * width, 3 * width), apart=(gemms,) * (1 + config.states)),),
        prepares=True,
        once=((16, width), (width, 16)),
        table=6 * config.num_layers * width,
        live=6 * width,
    )


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None) -> None:
    """Return None, because this model has no checkpoints."""


SIZES = {"two-streams": Config(), "two-states": Config(states=True), "fresh-text": Config(fresh=True)}
