"""The seams: what a model calls, what a strategy wraps, what one device computes. Data and types only.

Letters: B batch rows, L tokens of the sequence, l tokens on this rank, H query heads, G key-value heads, D head dim,
E model width, C latent channels, R rows of a modulation table. `q_BlHD` is q with dims (B, l, H, D).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

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


@dataclass(frozen=True)
class Outbox:
    """Where q, k and v of some heads of this rank's tokens are written for one reader; each view is (l, B, heads, D).

    A view of None is not sent to that reader (`kv_gather` sends no q). `heads` and `kv_heads` say which heads.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    heads: slice
    kv_heads: slice


@dataclass(frozen=True)
class Places:
    """Where every head of some outboxes is written, for a kernel that writes them all.

    table[part, copy, head] = (address, token stride, batch stride), int64 on the device of the outboxes; strides in
    elements; part 0, 1, 2 is q, k, v. A head that several readers want has several copies; address 0 is no place.
    `alignment` divides all addresses and strides, in bytes, and is at most 16.
    """

    table: Tensor
    dtype: torch.dtype
    alignment: int


class Outboxes(tuple[Outbox, ...]):
    """The outboxes of one exchange: made once with their buffers, so that no call computes or copies addresses."""

    @cached_property
    def places(self) -> Places:
        """Made at first use, which copies to the device: before a CUDA graph is captured."""
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        views = [view for box in self for view in (box.q, box.k, box.v) if view is not None]
        for box in self:
            for part, (view, heads) in enumerate(((box.q, box.heads), (box.k, box.kv_heads), (box.v, box.kv_heads))):
                for index, head in enumerate(range(heads.start, heads.stop) if view is not None else ()):
                    assert view is not None
                    place = (view[:, :, index].data_ptr(), view.stride(0), view.stride(1))
                    found.setdefault((part, head), []).append(place)
        dtype = views[0].dtype
        if any(view.dtype != dtype or view.stride(-1) != 1 for view in views):
            raise ValueError("got outboxes of several dtypes or with strided head dims, expected one dtype, contiguous")
        copies, heads = max(map(len, found.values()), default=1), max((head + 1 for _, head in found), default=1)
        table, alignment = torch.zeros(3, copies, heads, 3, dtype=torch.int64), 16
        for (part, head), places in found.items():
            table[part, : len(places), head] = torch.tensor(places)
            for address, *strides in places:
                alignment = gcd(alignment, address, *(stride * dtype.itemsize for stride in strides))
        return Places(table.to(views[0].device), dtype, alignment)


class Core(Protocol):
    """Attention over the given q, k, v on one device: what strategies wrap.

    Takes (B, L, H, D), (B, L', G, D), (B, L', G, D), any strides with a contiguous last dim, G dividing H.
    Returns out (B, L, H, D) and lse (B, H, L): natural log, fp32 (fp64 for fp64).
    """

    def __call__(self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Attend(Protocol):
    """Attention of this rank's tokens to the whole sequence: what a model calls, once a block.

    Takes strided views (B, l, H, D), (B, l, G, D), (B, l, G, D). Returns (B, l, H, D), which may be a buffer that
    the next call overwrites: use it at once. Over several ranks it has `tokens`, those of the whole sequence.
    """

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, prepare: Prepare, /) -> Tensor: ...


class KeysSent(Protocol):
    """Keys on their way to all ranks. Values follow, then queries, once each."""

    @property
    def room(self) -> Tensor | None:
        """Where the product of the values may be written, (B, l, G, D) and contiguous, so that nothing else has to
        bring them there; None where they must come from elsewhere. Until `send_values`."""
        ...

    def send_values(self, v_BlGD: Tensor, /) -> None:
        """Send them: `room` itself, or strided views as a call takes them."""
        ...

    def receive(self, q_BlHD: Tensor, /) -> Tensor:
        """Attend with these queries, and return what a call returns."""
        ...


@runtime_checkable
class KeysFirst(Attend, Protocol):
    """An `Attend` that would rather have keys, then values, before there are queries: they travel meanwhile."""

    def send_keys(self, k_BlGD: Tensor, heads: int, prepare: Prepare, /) -> KeysSent:
        """Send them; so many heads of queries will follow.

        What was returned before, and has not received, must not be used any more.
        """
        ...


class SequenceModel(nn.Module):
    """A diffusion transformer over tokens that knows nothing of ranks. One model = one file in `seqpar/models`."""

    SEQUENCE_INPUTS: ClassVar[Mapping[str, int]] = {"tokens": 1}
    """The inputs that are split over the ranks, with their token dim."""

    LABELS: ClassVar[tuple[str, ...]] = ()
    """The names of `condition`'s keyword arguments."""

    config: Any
    """A frozen dataclass with at least sample_size, patch_size, in_channels, out_channels."""

    def patchify(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> tokens (B, L, C*p*p), each token ordered (C, ph, pw), tokens row-major."""
        raise NotImplementedError

    def unpatchify(self, tokens_BLC: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `patchify` for any channel count; height and width of the latent."""
        raise NotImplementedError

    def positions(self, height: int, width: int) -> Tensor:
        """Rows for every token of a latent of this size, (L, ...); the caller slices its own."""
        raise NotImplementedError

    def condition(self, t_R: Tensor, **labels: Tensor) -> Condition:
        """Everything that depends on timestep and labels alone, for R rows, in fp32 (fp64 for an fp64 model)."""
        raise NotImplementedError

    def forward_tokens(
        self, inputs: Mapping[str, Tensor], positions: Tensor, condition: Condition, attend: Attend
    ) -> Tensor:
        """This rank's tokens -> its predictions (B, l, C_out*p*p), ordered like `patchify`'s tokens."""
        raise NotImplementedError

    def null_labels(self, labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The labels of the unconditional branch."""
        raise NotImplementedError

    def check_size(self, height: int, width: int) -> None:
        """Raise `ValueError` where a latent of height x width cannot be cut into patches."""
        patch = self.config.patch_size
        if height < 1 or width < 1 or height % patch or width % patch:
            raise ValueError(f"got a latent of {height} x {width}, expected multiples of the patch size {patch}")


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


def sharded(model: SequenceModel, inputs: Mapping[str, Tensor], mine: slice) -> dict[str, Tensor]:
    """A model's inputs, those that it declares as sequences cut to my tokens."""
    dims = {name: model.SEQUENCE_INPUTS.get(name) for name in inputs}
    return {name: x if (dim := dims[name]) is None else x.narrow(dim, mine.start, mine.stop - mine.start)
            for name, x in inputs.items()}  # fmt: skip


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state that must not be rounded to the model's: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype, torch.float32)


def rows(condition: Condition, index_B: Tensor) -> dict[str, Tensor]:
    """Some rows of a condition, one for each batch row."""
    return {name: table.index_select(0, index_B) for name, table in condition.items()}
