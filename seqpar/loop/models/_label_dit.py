"""The base class of class-conditional DiTs: patch embedding, timestep and label embedding, adaLN and the final layer.

A model adds its block, its positions and how tokens are embedded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.families._block import Input, unrounded
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.rows8 import Rounding
from seqpar.loop.interface import Condition, SequenceModel
from seqpar.loop.models._layers import sinusoid, through
from seqpar.types.arguments import check_labels
from seqpar.types.keys import shape_of
from seqpar.types.protocols import Attend, state_dtype

FREQUENCIES = 256  # width of the timestep sinusoid, in every published model


class AdaLN(NamedTuple):
    """adaLN before a GEMM: shift and scale (B, E) of the norm's result, and how it is rounded for a GEMM in 8 bits."""

    shift_BE: Tensor
    scale_BE: Tensor
    norm: Norm
    rounding: Rounding | None = None

    def of(self, x_BlE: Tensor) -> Input:
        """Return the GEMM's input, the stream x normalised and modulated."""
        return norm_modulate(x_BlE, self.shift_BE, self.scale_BE, self.norm, rounding=self.rounding)

    def after(self, x_BlE: Tensor, gate_BE: Tensor, branch_BlE: Tensor, keep: bool = True) -> tuple[Tensor, Input]:
        """Return the stream x + gate * branch, unless it is not kept, and the GEMM's input, in one kernel."""
        given = x_BlE, gate_BE, branch_BlE, self.shift_BE, self.scale_BE, self.norm
        return gate_norm_modulate(*given, keep=keep, rounding=self.rounding)


class LabelDiT(SequenceModel):
    """Embedders, `blocks` (each with a `modulation` layer of 6 widths) and the final layer.

    config: has patch_size, in_channels, out_channels, num_classes, num_layers and width. c: width of the condition, the
    sum of timestep and label embedding. block: makes one block. freq_shift: see `seqpar.loop.models._layers.sinusoid`.
    """

    PROMPT = ("class_labels",)
    FINAL_NORM: ClassVar[Norm]

    def __init__(self, config: Any, c: int, block: Callable[[], nn.Module], freq_shift: float = 0.0) -> None:
        super().__init__()
        self.config, self._freq_shift = config, freq_shift
        width, area = config.width, config.patch_size**2
        self.x_embedder = nn.Linear(config.in_channels * area, width)
        self.t_embedder = nn.Sequential(nn.Linear(FREQUENCIES, c), nn.SiLU(), nn.Linear(c, c))
        self.y_embedder = nn.Embedding(config.num_classes + 1, c)  # the last row is "no class"
        self.blocks = nn.ModuleList(block() for _ in range(config.num_layers))
        self.final_modulation = nn.Linear(c, 2 * width)
        self.final = nn.Linear(width, config.out_channels * area)

    @abstractmethod
    def positions(self, *size: int) -> Tensor:
        """The position rows (L, ...) of all tokens of a latent of this height and width."""

    @abstractmethod
    def embedded(self, patches_BlI: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """The tokens before the first block, and what each block takes besides."""

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        blocks: list[Any] = list(self.blocks)
        modulations, final_B2E = conditioning["blocks"].unbind(1), conditioning["final"]
        starts = [block.start(modulation) for block, modulation in zip(blocks, modulations, strict=True)]
        ends = [*starts[1:], AdaLN(final_B2E[:, 0], final_B2E[:, 1], self.FINAL_NORM)]
        x, besides = self.embedded(streams["image"], positions["image"])
        h = starts[0].of(x)
        for index, (block, modulation) in enumerate(zip(blocks, modulations, strict=True)):
            x, h = block(x, h, modulation, *besides, ends[index], attend, keep=index + 1 < len(ends))
        return {"image": self.final(unrounded(h))}

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        return {"image": self.positions(*size)}

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Compute {"blocks": (R, layers, 6, E), "final": (R, 2, E)}, fp32 (fp64 for an fp64 model).

        The six rows of a block are shift, scale and gate of its attention, then of its MLP; the two final rows are
        shift and scale.
        """
        wide = state_dtype(self.x_embedder.weight.dtype)
        first, _, second = self.t_embedder
        sines = sinusoid(t_R, FREQUENCIES, self._freq_shift)
        t = through(F.silu(through(sines, wide)(first)), wide)(second)
        c_RC = F.silu(t + self.y_embedder(pooled["class_labels"]).to(wide))
        # one layer at a time, because fp32 copies of all weights would need twice their memory
        modulated = through(c_RC, wide)
        blocks = c_RC.new_empty(len(t_R), len(self.blocks), 6, self.config.width)
        for index, block in enumerate(self.blocks):
            blocks[:, index] = modulated(block.get_submodule("modulation")).unflatten(-1, (6, -1))
        return {"blocks": blocks, "final": modulated(self.final_modulation).unflatten(-1, (2, -1))}

    def check_prompt(self, prompt: Mapping[str, Tensor]) -> None:
        for name, labels in prompt.items():
            check_labels(name, labels, self.config.num_classes)

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.full_like(label, self.config.num_classes) for name, label in prompt.items()}


def count_classes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The number of classes of a checkpoint with the authors' keys; ValueError if it has none."""
    rows = shape_of(shapes, "y_embedder.embedding_table.weight", 2)[0]
    if rows < 2:
        raise ValueError(
            f"y_embedder.embedding_table.weight has {rows} row, expected a row per class and another for no class"
        )
    return rows - 1


def check_outputs(kind: str, inputs: int, outputs: int) -> None:
    """Raise ValueError unless a final layer predicts a value for each input channel, with or without its variance."""
    if outputs not in (inputs, 2 * inputs):
        expected = f"{inputs}, or {2 * inputs} with variances"
        raise ValueError(
            f"got a {kind} with {outputs} output channels for {inputs} input channels, expected {expected}"
        )


def confirm(kind: str, by_files: Mapping[str, Any], by_tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if a config, or the arguments of training, state another size than the tensors have."""
    for name in by_files.keys() & by_tensors.keys():
        if by_files[name] is not None and by_files[name] != by_tensors[name]:
            raise ValueError(
                f"got a {kind} with {name}={by_files[name]!r} by its files, but {by_tensors[name]!r} by its tensors"
            )
