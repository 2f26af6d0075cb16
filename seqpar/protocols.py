"""The seams: what a model calls, what a strategy wraps, what one device computes. Data and types only.

Letters: B batch rows, L tokens of the sequence, l tokens on this rank, H query heads, G key-value heads, D head dim,
E model width, C latent channels, R rows of a modulation table. `q_BlHD` is q with dims (B, l, H, D).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Condition = Mapping[str, Tensor]
"""What a model needs besides tokens and positions; every tensor has a leading row dim R (empty where nothing is)."""


@dataclass(frozen=True)
class Prepare:
    """What happens to q and k between the projection and attention; executed by `seqpar.kernels.prepare`.

    norm: "layer" (LayerNorm, weight and bias) or "rms" (weight) over the whole width H*D, or over each head where
    `per_head`; statistics in fp32. Weights are (H*D,), or (D,) where `per_head`; None means no affine.
    cos_lD2, sin_lD2: rotary rows of this rank's tokens, (l, D/2); `interleaved` pairs (x[2j], x[2j+1]), otherwise
    (x[j], x[j + D/2]).
    """

    norm: Literal["none", "layer", "rms"] = "none"
    per_head: bool = False
    eps: float = 1e-5
    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    cos_lD2: Tensor | None = None
    sin_lD2: Tensor | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.norm == "rms" and (self.q_bias is not None or self.k_bias is not None):
            raise ValueError("got a bias for an RMSNorm, expected None: RMSNorm has only a weight")

    @property
    def is_identity(self) -> bool:
        """Whether q and k pass as they are."""
        return self.norm == "none" and self.cos_lD2 is None


class Core(Protocol):
    """Attention over the given q, k, v on one device: what strategies wrap.

    Takes (B, L, H, D), (B, L', G, D), (B, L', G, D), any strides with a contiguous last dim, G dividing H, and a key
    mask (B, L') or None (see `Attend`). Returns out (B, L, H, D) and lse (B, H, L): natural log, fp32 (fp64 for fp64).
    Where all keys of a row are masked, out is finite and lse is -inf, or so negative that `merge` gives out weight 0.
    """

    def __call__(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Given:
    """A stream whose q, k and v the model made itself: (B, l, H, D), (B, l, G, D), (B, l, G, D).

    Any strides with a contiguous last dim.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    prepare: Prepare

    @property
    def tokens(self) -> int:
        """l, the tokens of this stream on this rank; may be 0."""
        return self.q.shape[1]


@dataclass(frozen=True)
class Projected:
    """A stream as the input of its fused QKV projection, so that the strategy chooses between one GEMM and three.

    x: (B, l, E). weight: ((H + 2 G) D, E), the rows of q, then k, then v. bias: ((H + 2 G) D,) or None.
    heads, kv_heads: H and G.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int
    kv_heads: int
    prepare: Prepare

    @property
    def tokens(self) -> int:
        """l, the tokens of this stream on this rank; may be 0."""
        return self.x.shape[1]


Stream = Given | Projected
"""One kind of tokens (image, text) of this rank on the way to attention, with its own norms and rotary rows."""


class Attend(Protocol):
    """Attention of this rank's tokens to the whole sequence: what a model calls, once a block.

    streams: this rank's tokens of each stream, always in the same order; all with the same B, H, G, D and dtype.
    mask_BL: which keys are attended to, (B, L) bool with True for those that are, or the same as numbers to be added
    (`seqpar.masks.key_bias`, made once a run). Keys of all ranks are in joined order: [t0 i0 t1 i1 ...], the streams of
    rank 0, those of rank 1 and so on (`seqpar.masks.joined_mask`). None attends to all keys.

    Returns (B, l, H, D) for each stream; these may be views of a buffer that the next call overwrites.
    """

    tokens: int
    """The tokens of the whole sequence, of all ranks and streams together."""

    def __call__(self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Encoded:
    """What a model computes once a run from R prompts: it depends on neither the step nor the state.

    streams: constant streams (projected text), (R, L, ...) each; those in the model's `STREAMS` are split over the
    ranks like the state, others (for cross-attention) stay whole on every rank. masks: (R, L) bool for streams with
    padding, True for tokens. pooled: what `modulate` takes besides the timestep, R rows each.
    """

    streams: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Mapping[str, Tensor] = field(default_factory=dict)


class SequenceModel(nn.Module):
    """A diffusion transformer over streams of tokens that knows nothing of ranks; one file in `seqpar/models`.

    It has three levels: `encode` once a run, `modulate` once for each step and distinct prompt (before the loop), and
    `forward_tokens` in every step on a rank's tokens.
    """

    STREAMS: tuple[str, ...] = ("image",)
    """The streams that meet in attention, in the order in which `forward_tokens` hands them to `attend`."""

    STATE: tuple[str, ...] = ("image",)
    """Those of `STREAMS` that are denoised; the first is the latent that the model's sizes belong to."""

    PROMPT: tuple[str, ...] = ()
    """The names of `encode`'s keyword arguments."""

    MASKS: Mapping[str, str] = MappingProxyType({})
    """Those of `PROMPT` that are masks, and whose tokens they mask; a mask that is not given is all True."""

    EMBEDS_GUIDANCE: bool = False
    """Whether `modulate` takes the guidance scale, as `guidance`, (R,)."""

    config: Any
    """A frozen dataclass with at least sample_size, patch_size, in_channels, out_channels."""

    def patchify(self, x: Tensor) -> Tensor:
        """(B, C, H, W) or (B, C, T, H, W) -> tokens (B, L, C*pt*ph*pw), each ordered (C, pt, ph, pw), row-major."""
        return patches_of(x, self.patch)

    def unpatchify(self, tokens_BLC: Tensor, *size: int) -> Tensor:
        """The inverse of `patchify` for any channel count; size: (height, width) or (frames, height, width)."""
        return from_patches(tokens_BLC, self.patch, size)

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of a patch; `config.patch_size` is all three, or the side of one frame's squares."""
        patch = self.config.patch_size
        return (1, patch, patch) if isinstance(patch, int) else patch

    def positions(self, *size: int) -> Tensor:
        """Rows for every token of a latent of this size, (L, ...); the caller slices its own."""
        raise NotImplementedError

    def stream_positions(self, size: tuple[int, ...], lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """Rows for every token of the streams that have positions; lengths: tokens of each stream of `STREAMS`."""
        return {self.STATE[0]: self.positions(*size)}

    def encode(self, **prompt: Tensor) -> Encoded:
        """What R prompts come to for a whole run. A class-conditional model has labels only, for `modulate`."""
        return Encoded(pooled=prompt)

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Everything that depends on the timestep and the pooled prompt alone, for R rows, in fp32 (or fp64)."""
        raise NotImplementedError

    def forward_tokens(
        self, streams: Mapping[str, Tensor], positions: Mapping[str, Tensor], conditioning: Condition, attend: Attend
    ) -> dict[str, Tensor]:
        """This rank's tokens of each stream -> the predictions of the state's streams, (B, l, C_out*p*p) each.

        conditioning: `modulate`'s tensors with a row for each batch row, and "mask", (B, L) bool, where streams have
        padding: it goes to `attend` as it is. A prediction is ordered like `patchify`'s tokens and may be wider than
        the state (variances come last).
        """
        raise NotImplementedError

    def null_prompt(self, prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The prompt of the unconditional branch where the caller names none."""
        raise NotImplementedError

    def check_size(self, *size: int) -> None:
        """Raise `ValueError` where a latent of this (frames,) height and width cannot be cut into patches."""
        patch = self.patch[-len(size) :]
        if any(side < 1 or side % own for side, own in zip(size, patch, strict=True)):
            shown = self.config.patch_size
            raise ValueError(
                f"got a latent of {' x '.join(map(str, size))}, expected multiples of the patch size {shown}"
            )


def patches_of(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """(B, C, H, W) or (B, C, T, H, W) -> (B, L, C*pt*ph*pw), tokens row-major, each as a convolution's weight."""
    x = x if x.dim() == 5 else x[:, :, None]
    (batch, channels, *size), (pt, ph, pw) = x.shape, patch
    t, h, w = size[0] // pt, size[1] // ph, size[2] // pw
    x = x.reshape(batch, channels, t, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(batch, t * h * w, channels * pt * ph * pw)


def from_patches(tokens_BLC: Tensor, patch: tuple[int, int, int], size: tuple[int, ...]) -> Tensor:
    """The inverse of `patches_of`, for any channel count; size: (H, W) or (T, H, W)."""
    (pt, ph, pw), (frames, height, width) = patch, size if len(size) == 3 else (1, *size)
    x = tokens_BLC.reshape(len(tokens_BLC), frames // pt, height // ph, width // pw, -1, pt, ph, pw)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tokens_BLC), -1, *size)


def plugins(package: ModuleType) -> dict[str, str]:
    """Name -> module path of every file in a folder of plugins (no registry to edit: one file adds one name)."""
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: f"{package.__name__}.{name}" for name in sorted(found) if not name.startswith("_")}


def plugin(package: ModuleType, name: str, kind: str) -> ModuleType:
    """The plugin of that name; `ValueError` says what `kind` of thing it would be, and lists the names there are."""
    known = plugins(package)
    if name not in known:
        raise ValueError(f"got {kind} {name!r}, expected one of {', '.join(known)}")
    return importlib.import_module(known[name])


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state that must not be rounded to the model's: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype, torch.float32)


def rows(condition: Condition, index_B: Tensor) -> dict[str, Tensor]:
    """Some rows of a condition, one for each batch row."""
    return {name: table.index_select(0, index_B) for name, table in condition.items()}
