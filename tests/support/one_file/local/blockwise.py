"""Blockwise: attention over a few keys at a time, whose results are merged by their log-sum-exp.

Only `tests/test_one_file.py` adds this local attention to the folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.merge import merge
from seqpar.local import reference

KEYS = 4  # of a block


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys after the other; see `seqpar.types.protocols.Core`."""
    out = lse = None
    for start in range(0, k_BLGD.shape[1], KEYS):
        some = slice(start, start + KEYS)
        mask = None if mask_BL is None else mask_BL[:, some]
        out, lse = merge(out, lse, *reference.attend(q_BLHD, k_BLGD[:, some], v_BLGD[:, some], mask))
    assert out is not None
    assert lse is not None
    return out.to(q_BLHD.dtype), lse


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None: it takes everything, and key masks."""
    return None


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return why the bits of a query may depend on the number of queries."""
    return "its matrix products may round rows of one shape in another way than those of another"


def preference(major: int, head_dim: int) -> int:
    """Return the lowest of all preferences, so that "auto" never takes it."""
    return -1000
