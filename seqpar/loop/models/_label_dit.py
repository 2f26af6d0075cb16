"""The base class of class-conditional DiTs: patch embedding, timestep and label embedding, adaLN and the final layer.

A model adds its block, its positions and `forward_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.loading.keys import shape_of
from seqpar.loop.interface import Condition, SequenceModel
from seqpar.loop.models import _layers
from seqpar.types.arguments import check_labels
from seqpar.types.protocols import state_dtype

FREQUENCIES = 256  # width of the timestep sinusoid, in every published model


class LabelDiT(SequenceModel):
    """Embedders, `blocks` (each with a `modulation` layer of 6 widths) and the final layer.

    config: has patch_size, in_channels, out_channels, num_classes, num_layers and width. c: width of the condition, the
    sum of timestep and label embedding. block: makes one block. freq_shift: see `seqpar.loop.models._layers.sinusoid`.
    """

    PROMPT = ("class_labels",)

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

    def positions(self, *size: int) -> Tensor:
        """The position rows (L, ...) of all tokens of a latent of this height and width."""
        raise NotImplementedError

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """The position rows of the only stream."""
        return {"image": self.positions(*size)}

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Return {"blocks": (R, layers, 6, E), "final": (R, 2, E)}, fp32 (fp64 for an fp64 model).

        The six rows of a block are shift, scale and gate of its attention, then of its MLP; the two final rows are
        shift and scale.
        """
        wide = state_dtype(self.x_embedder.weight.dtype)
        first, _, second = self.t_embedder
        sines = _layers.sinusoid(t_R, FREQUENCIES, self._freq_shift)
        t = _layers.linear(F.silu(_layers.linear(sines, first, wide)), second, wide)
        c_RC = F.silu(t + self.y_embedder(pooled["class_labels"]).to(wide))
        # one layer at a time, because fp32 copies of all weights would need twice their memory
        modulated, blocks = (
            _layers.through(c_RC, wide),
            c_RC.new_empty(len(t_R), len(self.blocks), 6, self.config.width),
        )
        for index, block in enumerate(self.blocks):
            blocks[:, index] = modulated(block.get_submodule("modulation")).unflatten(-1, (6, -1))
        return {"blocks": blocks, "final": modulated(self.final_modulation).unflatten(-1, (2, -1))}

    def check_prompt(self, prompt: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` for labels that are no classes."""
        for name, labels in prompt.items():
            check_labels(name, labels, self.config.num_classes)

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the label that means "no class"."""
        return {name: torch.full_like(label, self.config.num_classes) for name, label in prompt.items()}


def count_classes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of classes of an original checkpoint; ValueError if it has none, as no label can be asked."""
    rows = shape_of(shapes, "y_embedder.embedding_table.weight", 2)[0]
    if rows < 2:
        got = f"a checkpoint with y_embedder.embedding_table.weight of {rows} row"
        raise ValueError(f"got {got}, expected one for each class, and one for no class")
    return rows - 1


def check_outputs(kind: str, inputs: int, outputs: int) -> None:
    """Raise ValueError if a final layer predicts no value for each input channel, with or without its variance."""
    if outputs not in (inputs, 2 * inputs):
        expected = f"{inputs}, or {2 * inputs} with variances"
        raise ValueError(
            f"got a {kind} with {outputs} output channels for {inputs} input channels, expected {expected}"
        )


def is_diffusers(config: Mapping[str, Any] | None) -> bool:
    """Return whether this is a config.json, rather than what is known beside an original file (`Checkpoint.about`)."""
    return config is not None and "_class_name" in config


def original_heads(kind: str, width: int, layers: int, said: Mapping[str, Any], published: Iterable[Any]) -> int:
    """Return the number of heads of an original checkpoint, which its shapes do not tell.

    said: "heads" is the user's word; "args", the arguments of the training script, may have num_heads. published: the
    configs that the authors released; a checkpoint with the width and number of layers of one of them has its heads.
    Raises ValueError if nothing says the number, or if it does not fit.
    """
    known = {(config.width, config.num_layers): config.num_attention_heads for config in published}
    told = said.get("args", {}).get("num_heads")
    if isinstance(told, int):
        confirm(kind, {"heads": said.get("heads")}, {"heads": told})
    heads = said.get("heads") or (told if isinstance(told, int) else known.get((width, layers)))
    if heads is None:
        raise ValueError(
            f"got a {kind} of width {width} with {layers} layers, expected its number of heads from you, because no "
            f"file says it and no released model has this size; name it by --heads (or heads= in Python)"
        )
    if heads < 1 or width % heads or width // heads % 2:
        raise ValueError(f"got {heads} heads for a {kind} of width {width}, expected heads of equal, even width")
    return heads


def confirm_heads(kind: str, said: Mapping[str, Any], named: Any) -> None:
    """Raise ValueError if the user, or num_heads in args, says other heads than the model that args.model names."""
    name, heads = said["args"]["model"], named.num_attention_heads
    for what, count in {"--heads": said.get("heads"), "args.num_heads": said["args"].get("num_heads")}.items():
        if count not in (None, heads):
            raise ValueError(f"got a {kind} with {what} {count}, expected the {heads} heads of args.model, {name}")


def confirm(kind: str, said: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ValueError if the arguments of training (or a config) state another size than the tensors have.

    said, found: name -> value; names that only one of them has are not compared.
    """
    for name in said.keys() & found.keys():
        if said[name] is not None and said[name] != found[name]:
            raise ValueError(
                f"got a {kind} whose files say {name}={said[name]!r}, but whose tensors have {found[name]!r}"
            )
