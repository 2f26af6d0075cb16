"""`SequenceModel`: what the denoising loop asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

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
