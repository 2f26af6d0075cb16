"""A toy class-conditional transformer whose MLP squares its positive values, as one file of `loop/models` would be.

Only `tests/test_one_file.py` adds it to the folder. Its family is that of all models of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqpar.kernels.relu_squared import relu_squared  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.loop.interface import Condition
from seqpar.loop.models._label_dit import LabelDiT
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Attend, Prepare, Projected

NORM = Norm("layer", 1e-6)


@dataclass(frozen=True)
class Config:
    """The sizes of a model of a few thousand weights."""

    num_attention_heads: int = 3
    attention_head_dim: int = 8
    num_layers: int = 2
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 4
    sample_size: int = 8
    num_classes: int = 5

    @property
    def width(self) -> int:
        """Return E, the width of the model."""
        return self.num_attention_heads * self.attention_head_dim


class Block(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.num_attention_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, modulation_B6E: Tensor, attend: Attend) -> Tensor:
        """Return the stream after this block."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation_B6E.unbind(1)
        h = norm_modulate(x, shift, scale, NORM)
        (out,) = attend((Projected(h, self.qkv.weight, self.qkv.bias, self.heads, self.heads, Prepare()),))
        x, h = gate_norm_modulate(x, gate, self.proj(out.flatten(2)), shift_mlp, scale_mlp, NORM)
        return x + gate_mlp[:, None].to(x.dtype) * self.fc2(relu_squared(self.fc1(h)))


class Model(LabelDiT):
    """The model that the module's docstring describes; it has no positions."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.width, lambda: Block(config))

    def positions(self, *size: int) -> Tensor:
        """Return rows of no values, (L, 0)."""
        return self.x_embedder.weight.new_zeros((size[0] // 2) * (size[1] // 2), 0)

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        """Return {"image": predictions}; see `SequenceModel.forward_tokens`."""
        x, (shift, scale) = (
            self.x_embedder(streams["image"].to(self.final.weight.dtype)),
            conditioning["final"].unbind(1),
        )
        for block, modulation in zip(self.blocks, conditioning["blocks"].unbind(1), strict=True):
            x = block(x, modulation, attend)
        return {"image": self.final(norm_modulate(x, shift, scale, NORM))}


def work(config: Config) -> Work:
    """Return the cost of a token for the planner."""
    width = config.width
    gemms = ((width, 3 * width), (width, width), (width, 2 * width), (2 * width, width))
    return Work(
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        blocks=(Blocks(config.num_layers, gemms, (4 * width, 4 * width, 4 * width)),),
        prepares=False,
        once=((16, width), (width, 16)),
        table=(6 * config.num_layers + 2) * width,
        live=8 * width,
    )


PRESETS = {"toy-labels": Config()}


def recognise(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None) -> None:
    """Return None, because this model has no checkpoints."""
