"""`SequenceModel`: what the denoising loop asks of a model, and the tokens of its streams on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.families._block import Matrix
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.types.protocols import Attend, from_patches, patches_of

Condition = Mapping[str, Tensor]
Prompt = Mapping[str, Tensor]
"""The keyword arguments of a model's `encode`, with one row per image."""


@dataclass(frozen=True)
class Encoded:
    """The result of a model's `encode` for R prompts, which depends on neither the step nor the state.

    streams: constant streams, (R, L, ...) each; those in the model's `STREAMS` are sharded like the state, others stay
    whole on every rank. pooled: the inputs of `modulate` besides the timestep, R rows each.
    """

    streams: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Mapping[str, Tensor] = field(default_factory=dict)


class MatrixBlock(nn.Module):
    """Base class of blocks that call their GEMMs as `Matrix`, so that they can compute in 8 bits.

    `others` holds matrices in place of the block's own layers; `seqpar.loop.eight` sets it while a model computes.
    """

    MATRICES: tuple[str, ...] = ()
    """The names of the block's linear layers that compute in 8 bits with precision="fp8"."""

    def __init__(self) -> None:
        super().__init__()
        self.others: Mapping[str, Matrix] = {}

    def matrix(self, name: str) -> Matrix:
        """The matrix of a linear layer: its own weights, read now, or what is in their place."""
        other = self.others.get(name)
        if other is not None:
            return other
        layer = self.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return Matrix(layer.weight, layer.bias)


class SequenceModel(nn.Module, ABC):
    """Base class of diffusion transformers over streams of tokens; a model knows nothing about ranks.

    The loop calls `encode` once per run, `modulate` once for each step and distinct prompt (before the steps), and
    `forward_tokens` in every step on a rank's tokens.
    """

    STREAMS: tuple[str, ...] = ("image",)
    """The streams that attention joins, in the order in which `forward_tokens` passes them to `attend`."""

    STATE: tuple[str, ...] = ("image",)
    """The members of `STREAMS` that are denoised; the model's sizes describe the latent of the first."""

    PROMPT: tuple[str, ...] = ()
    """The names of `encode`'s keyword arguments."""

    config: Any
    """A frozen dataclass with at least sample_size, patch_size, in_channels and out_channels."""

    # Patches -------------------------------------------------------------------------------------------------------

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of a patch; an int `config.patch_size` is height and width of one frame."""
        patch = self.config.patch_size
        return (1, patch, patch) if isinstance(patch, int) else patch

    def patchify(self, x: Tensor) -> Tensor:
        """Split (B, C, H, W) or (B, C, T, H, W) into tokens (B, L, C*pt*ph*pw), each ordered (C, pt, ph, pw)."""
        return patches_of(x, self.patch)

    def unpatchify(self, tokens_BLC: Tensor, *size: int) -> Tensor:
        """Invert `patchify`, for any channel count; size: (frames,) height and width."""
        return from_patches(tokens_BLC, self.patch, size)

    def check_size(self, *size: int) -> None:
        """Raise ValueError if a latent of this (frames,) height and width is not divisible into patches."""
        patch = self.patch[-len(size) :]
        if any(side < 1 or side % unit for side, unit in zip(size, patch, strict=True)):
            shown = self.config.patch_size
            raise ValueError(
                f"got a latent of {' x '.join(map(str, size))}, expected multiples of the patch size {shown}"
            )

    # Prompts -------------------------------------------------------------------------------------------------------

    def encode(self, **prompt: Tensor) -> Encoded:
        """Encode R prompts for a whole run; by default, all of the prompt is passed to `modulate`."""
        return Encoded(pooled=prompt)

    @abstractmethod
    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The prompt of the unconditional branch, if the caller gives none."""

    def check_prompt(self, prompt: Mapping[str, Tensor]) -> None:
        """Raise ValueError for invalid values of a prompt; this may wait for the device."""

    # Evaluations ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """The position rows (L, ...) of all tokens of each stream that has positions.

        size: (frames,) height and width of the first stream's latent. lengths: tokens of each stream of `STREAMS`.
        """

    @abstractmethod
    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Compute everything that depends only on timestep and pooled prompt, for R rows, in fp32 (or fp64)."""

    @abstractmethod
    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        """Predict the state's streams (B, l, C_out*p*p) for this rank's tokens.

        conditioning: the tensors of `modulate` with a row for each batch row. A prediction has the order of `patchify`
        and may be wider than the state, with variances last.
        """


def rows(condition: Condition, index_B: Tensor) -> dict[str, Tensor]:
    """The rows of a condition for a batch; index_B: the row of each batch row."""
    return {name: table.index_select(0, index_B) for name, table in condition.items()}


@dataclass(frozen=True)
class Split:
    """The streams that attention joins, in order, each with its `Shard`; `rank` is this rank's place on the axis.

    by_stream: see `JointShard`.
    """

    shards: tuple[tuple[str, Shard], ...]
    rank: int
    by_stream: bool = False

    @staticmethod
    def of(model: SequenceModel, lengths: Mapping[str, int], axis: Axis, by_stream: bool = False) -> Split:
        """Split streams of these token counts; ValueError if one of the model's streams is missing."""
        if missing := [name for name in model.STREAMS if name not in lengths]:
            raise ValueError(f"got streams {', '.join(lengths)}, expected {', '.join(missing)}, too")
        return Split(tuple((name, Shard(lengths[name], axis.size)) for name in model.STREAMS), axis.rank, by_stream)

    @property
    def tokens(self) -> Tokens:
        """The token counts that a strategy is built for."""
        streams = tuple(shard for _, shard in self.shards)
        return streams[0] if len(streams) == 1 else JointShard(streams, self.by_stream)

    @property
    def lengths(self) -> dict[str, int]:
        """The number of tokens of each stream on all ranks together."""
        return {name: shard.total for name, shard in self.shards}

    def shard(self, name: str) -> Shard:
        """The ranges of a stream's tokens that each rank owns."""
        return dict(self.shards)[name]

    def mine(self, name: str, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a stream, or all tokens if the stream is not sharded."""
        if name not in self.lengths:
            return x
        part = self.shard(name).slice(self.rank)
        return x.narrow(dim, part.start, part.stop - part.start)


def checked_prompt(model: SequenceModel, prompt: Prompt) -> dict[str, Tensor]:
    # in the order of the model's names
    if set(prompt) != set(model.PROMPT):
        raise ValueError(f"got prompt {sorted(prompt)}, expected {sorted(model.PROMPT)}")
    return {name: prompt[name] for name in model.PROMPT}


def distinct(prompt: Prompt) -> tuple[dict[str, Tensor], Tensor]:
    """The prompt's distinct rows, and the index among them of each row."""
    tensors = list(prompt.values())
    if all(x.dim() == 1 and not x.is_floating_point() for x in tensors):
        where = tensors[0].device  # on the host: a GPU sorts these few numbers by a dozen kernels and two syncs
        rows, index = torch.stack(tensors, dim=1).cpu().unique(dim=0, return_inverse=True)
        return dict(zip(prompt, rows.to(where).unbind(1), strict=True)), index.to(where)
    firsts, places, where = list[int](), list[int](), tensors[0].device
    for row in range(len(tensors[0])):
        same = (place for place, other in enumerate(firsts) if all(torch.equal(x[row], x[other]) for x in tensors))
        places.append(next(same, len(firsts)))
        firsts += [row] if places[-1] == len(firsts) else []
    index = torch.tensor(firsts, device=where)
    return {name: x[index] for name, x in prompt.items()}, torch.tensor(places, device=where)
