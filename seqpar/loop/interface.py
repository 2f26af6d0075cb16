"""`SequenceModel`: what the denoising loop asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.types.masks import joined_mask
from seqpar.types.protocols import Attend, from_patches, patches_of

Condition = Mapping[str, Tensor]


@dataclass(frozen=True)
class Encoded:
    """The result of a model's `encode` for R prompts, which depends on neither the step nor the state.

    streams: constant streams (projected text), (R, L, ...) each; those in the model's `STREAMS` are split over the
    ranks like the state, and others (for cross-attention) stay whole on every rank. masks: (R, L) bool for streams with
    padding, True for tokens. pooled: the inputs of `modulate` besides the timestep, with R rows each.
    """

    streams: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Mapping[str, Tensor] = field(default_factory=dict)


class SequenceModel(nn.Module):
    """Base class of diffusion transformers over streams of tokens; a model knows nothing about ranks.

    The sampler calls `encode` once a run, `modulate` once for each step and distinct prompt (before the loop), and
    `forward_tokens` in every step on a rank's tokens.
    """

    STREAMS: tuple[str, ...] = ("image",)
    """The streams that attention joins, in the order in which `forward_tokens` passes them to `attend`."""

    STATE: tuple[str, ...] = ("image",)
    """The members of `STREAMS` that are denoised; the model's sizes describe the latent of the first."""

    PROMPT: tuple[str, ...] = ()
    """The names of `encode`'s keyword arguments."""

    MASKS: Mapping[str, str] = MappingProxyType({})
    """Mask in `PROMPT` -> the name in `PROMPT` whose tokens it masks; a mask that is not given is all True."""

    config: Any
    """A frozen dataclass with at least sample_size, patch_size, in_channels and out_channels."""

    def patchify(self, x: Tensor) -> Tensor:
        """Split (B, C, H, W) or (B, C, T, H, W) into tokens (B, L, C*pt*ph*pw), each ordered (C, pt, ph, pw)."""
        return patches_of(x, self.patch)

    def unpatchify(self, tokens_BLC: Tensor, *size: int) -> Tensor:
        """Invert `patchify`, for any channel count; size: (height, width) or (frames, height, width)."""
        return from_patches(tokens_BLC, self.patch, size)

    @property
    def patch(self) -> tuple[int, int, int]:
        """Return frames, height and width of a patch; an int `config.patch_size` is height and width of one frame."""
        patch = self.config.patch_size
        return (1, patch, patch) if isinstance(patch, int) else patch

    def positions(self, *size: int) -> Tensor:
        """Return the position rows of every token of a latent of this size, (L, ...); the caller takes its rank's."""
        raise NotImplementedError

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the position rows of each stream that has positions; lengths: tokens of each stream of `STREAMS`."""
        return {self.STATE[0]: self.positions(*size)}

    def encode(self, **prompt: Tensor) -> Encoded:
        """Return what a whole run needs of R prompts; by default, all of the prompt is passed to `modulate`."""
        return Encoded(pooled=prompt)

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Return everything that depends only on timestep and pooled prompt, for R rows, in fp32 (or fp64)."""
        raise NotImplementedError

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        """Return the predictions (B, l, C_out*p*p) of the state's streams for this rank's tokens.

        conditioning: the tensors of `modulate` with a row for each batch row, and "mask", (B, L) bool, if streams have
        padding; pass the mask to `attend` unchanged. A prediction has the order of `patchify` and may be wider than the
        state, with variances last.
        """
        raise NotImplementedError

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the prompt of the unconditional branch, if the caller gives none."""
        raise NotImplementedError

    def check_prompt(self, prompt: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` if values of a prompt have no meaning; this may wait for the device."""

    def check_size(self, *size: int) -> None:
        """Raise `ValueError` if a latent of this (frames,) height and width cannot be split into patches."""
        patch = self.patch[-len(size) :]
        if any(side < 1 or side % own for side, own in zip(size, patch, strict=True)):
            shown = self.config.patch_size
            raise ValueError(
                f"got a latent of {' x '.join(map(str, size))}, expected multiples of the patch size {shown}"
            )


def rows(condition: Condition, index_B: Tensor) -> dict[str, Tensor]:
    """Return the rows of a condition for a batch; index_B: the row of each batch row."""
    return {name: table.index_select(0, index_B) for name, table in condition.items()}


Prompt = Mapping[str, Tensor]
"""The keyword arguments of a model's `encode`, with one row for each image."""


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
        """Return the split of streams with these token counts; ValueError if one of the model's streams is missing."""
        if missing := [name for name in model.STREAMS if name not in lengths]:
            raise ValueError(f"got streams {', '.join(lengths)}, expected {', '.join(missing)}, too")
        return Split(tuple((name, Shard(lengths[name], axis.size)) for name in model.STREAMS), axis.rank, by_stream)

    @property
    def tokens(self) -> Tokens:
        """Return the token counts that a strategy is built for."""
        streams = tuple(shard for _, shard in self.shards)
        return streams[0] if len(streams) == 1 else JointShard(streams, self.by_stream)

    @property
    def lengths(self) -> dict[str, int]:
        """Return the number of tokens of each stream on all ranks together."""
        return {name: shard.total for name, shard in self.shards}

    def shard(self, name: str) -> Shard:
        """Return the ranges of a stream's tokens that each rank owns."""
        return dict(self.shards)[name]

    def mine(self, name: str, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a stream, or all tokens if the stream is not split."""
        if name not in self.lengths:
            return x
        part = self.shard(name).slice(self.rank)
        return x.narrow(dim, part.start, part.stop - part.start)

    def mask(self, encoded: Encoded) -> Tensor | None:
        """Return the key mask (R, L) bool in the order of the joined keys, or None if no stream has padding."""
        masks = {name: mask for name, mask in encoded.masks.items() if name in self.lengths}
        if not masks:
            return None
        like = next(iter(masks.values()))
        shards = JointShard(tuple(shard for _, shard in self.shards), self.by_stream)
        return joined_mask([masks.get(name) for name, _ in self.shards], shards, like)


def completed(model: SequenceModel, prompt: Prompt) -> dict[str, Tensor]:
    """Return the prompt with an all-True mask for each missing mask; ValueError for names the model does not have."""
    names, masks = set(prompt), set(model.MASKS)
    if not set(model.PROMPT) - masks <= names <= set(model.PROMPT):
        raise ValueError(f"got prompt {sorted(names)}, expected {sorted(model.PROMPT)}")
    whole = dict(prompt)
    for mask, name in model.MASKS.items():
        if mask not in whole:
            whole[mask] = torch.ones(prompt[name].shape[:2], dtype=torch.bool, device=prompt[name].device)
    return {name: whole[name] for name in model.PROMPT}


def stacked(first: Prompt, second: Prompt) -> dict[str, Tensor]:
    """Concatenate the rows of two prompts; the shorter texts are padded with zeros, and their masks with False."""
    joined = {}
    for name, x in first.items():
        y = second[name].to(x.device)
        if x.dim() > 1:
            longest = max(x.shape[1], y.shape[1])
            x, y = (F.pad(z, [0, 0] * (z.dim() - 2) + [0, longest - z.shape[1]]) for z in (x, y))
        joined[name] = torch.cat((x, y))
    return joined


def check_lengths(model: SequenceModel, prompt: Prompt, negative: Prompt) -> None:
    """Raise ValueError if the texts of two prompts have different lengths and the model has no mask for padding."""
    masked = {*model.MASKS, *model.MASKS.values()}
    for name in sorted(prompt.keys() - masked):
        got, wanted = tuple(negative[name].shape[1:]), tuple(prompt[name].shape[1:])
        if got != wanted:
            raise ValueError(
                f"got a negative {name} of shape {got} a row, expected {wanted} as in the prompt: the model has no "
                f"mask for padding"
            )


def distinct(prompt: Prompt) -> tuple[dict[str, Tensor], Tensor]:
    """Return (the prompt's distinct rows, the index among them of each row)."""
    tensors = list(prompt.values())
    if all(x.dim() == 1 and not x.is_floating_point() for x in tensors):
        where = tensors[0].device  # a GPU would sort these few numbers by a dozen kernels, and wait for the host twice
        rows, index = torch.stack(tensors, dim=1).cpu().unique(dim=0, return_inverse=True)
        return dict(zip(prompt, rows.to(where).unbind(1), strict=True)), index.to(where)
    kept: list[int] = []
    places = []
    for row in range(len(tensors[0])):
        same = (place for place, other in enumerate(kept) if all(torch.equal(x[row], x[other]) for x in tensors))
        place = next(same, len(kept))
        kept += [row] if place == len(kept) else []
        places.append(place)
    where = tensors[0].device
    return {name: x[torch.tensor(kept, device=where)] for name, x in prompt.items()}, torch.tensor(places, device=where)
