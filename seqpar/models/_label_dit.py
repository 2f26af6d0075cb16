"""What class-conditional DiTs have in common around their blocks: patches in and out, timestep and label embedding,
adaLN modulation of all blocks and the final layer. A model adds its block, its positions and the order of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.models import _layers
from seqpar.protocols import Condition, SequenceModel, rows, state_dtype

FREQUENCIES = 256  # width of the timestep sinusoid, in every published model


@dataclass(frozen=True)
class Fixed:
    """The modulation of some timesteps with some labels, row t * labels + label, where the weights used to be."""

    t_T: Tensor
    label_N: Tensor
    table: Condition

    def look_up(self, t_R: Tensor, label_R: Tensor) -> Condition:
        """Rows of the table; `ValueError` for a timestep or label that it was not made for."""
        t_RT, label_RN = t_R.float()[:, None] == self.t_T, label_R[:, None] == self.label_N
        if not (t_RT.any(dim=1).all() and label_RN.any(dim=1).all()):
            raise ValueError(
                f"got a timestep or label outside the fixed schedule, expected timesteps {self.t_T.tolist()} and "
                f"labels {self.label_N.tolist()}: the weights for others were freed; load the model again"
            )
        return rows(self.table, t_RT.int().argmax(1) * len(self.label_N) + label_RN.int().argmax(1))


class LabelDiT(SequenceModel):
    """Embedders, `blocks` (each with a `modulation` of 6 widths) and the final layer.

    config: patch_size, in_channels, out_channels, num_classes, num_layers, width. c: width of the condition.
    """

    LABELS: ClassVar[tuple[str, ...]] = ("class_labels",)

    def __init__(self, config: Any, c: int, block: Callable[[], nn.Module], freq_shift: float = 0.0) -> None:
        super().__init__()
        self.config, self._freq_shift = config, freq_shift
        self._fixed: Fixed | None = None
        width, area = config.width, config.patch_size**2
        self.x_embedder = nn.Linear(config.in_channels * area, width)
        self.t_embedder = nn.Sequential(nn.Linear(FREQUENCIES, c), nn.SiLU(), nn.Linear(c, c))
        self.y_embedder = nn.Embedding(config.num_classes + 1, c)  # the last row is "no class"
        self.blocks = nn.ModuleList(block() for _ in range(config.num_layers))
        self.final_modulation = nn.Linear(c, 2 * width)
        self.final = nn.Linear(width, config.out_channels * area)

    def patchify(self, x_BCHW: Tensor) -> Tensor:
        """See `SequenceModel`."""
        return _layers.patchify(x_BCHW, self.config.patch_size)

    def unpatchify(self, tokens_BLC: Tensor, height: int, width: int) -> Tensor:
        """See `SequenceModel`."""
        return _layers.unpatchify(tokens_BLC, self.config.patch_size, height, width)

    def condition(self, t_R: Tensor, **labels: Tensor) -> Condition:
        """{"blocks": (R, layers, 6, E), "final": (R, 2, E)}: shift, scale and gate of each half of each block."""
        if self._fixed is not None:
            return self._fixed.look_up(t_R, labels["class_labels"])
        wide = state_dtype(self.x_embedder.weight.dtype)
        first, _, second = self.t_embedder
        sines = _layers.sinusoid(t_R, FREQUENCIES, self._freq_shift)
        t = _layers.linear(F.silu(_layers.linear(sines, first, wide)), second, wide)
        c_RC = F.silu(t + self.y_embedder(labels["class_labels"]).to(wide))
        # one layer at a time: the whole model in fp32 would double its memory
        modulated, blocks = (
            _layers.through(c_RC, wide),
            c_RC.new_empty(len(t_R), len(self.blocks), 6, self.config.width),
        )
        for index, block in enumerate(self.blocks):
            blocks[:, index] = modulated(block.get_submodule("modulation")).unflatten(-1, (6, -1))
        return {"blocks": blocks, "final": modulated(self.final_modulation).unflatten(-1, (2, -1))}

    def null_labels(self, labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `SequenceModel`."""
        return {name: torch.full_like(label, self.config.num_classes) for name, label in labels.items()}

    @torch.no_grad()
    def fix_schedule(self, timesteps: Tensor, class_labels: Tensor) -> int:
        """Keep the modulation of these timesteps and labels (and of "no class"), and free the weights that make it.

        For who samples with one schedule again and again: adaLN is a tenth of Large-DiT and a third of DiT. Returns the
        bytes freed, less the table's. Other timesteps or labels are an error from then on.
        """
        device = self.x_embedder.weight.device
        t = timesteps.to(device).float().unique()
        null = self.null_labels({"class_labels": class_labels[:1]})["class_labels"]
        labels = torch.cat((class_labels, null)).to(device).unique()
        table = self.condition(t.repeat_interleave(len(labels)), class_labels=labels.repeat(len(t)))
        before = _bytes(self.parameters())
        for module in (self, *self.blocks):
            for name in ("t_embedder", "y_embedder", "final_modulation", "modulation"):
                if hasattr(module, name):
                    delattr(module, name)
        self._fixed = Fixed(t, labels, table)
        return before - _bytes(self.parameters()) - _bytes(table.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
