"""Ring: queries stay, key-value blocks travel; partial results are merged by their log-sum-exp.

K and V of one block are one message; two blocks are in memory, never the sequence. Source: Ring Attention
(arXiv 2310.01889), ring self-attention (arXiv 2105.13120).
When it wins: fewer heads than ranks, memory for keys and values too small for the sequence, slow links hidden by long
attention. Its merge changes the rounding: close to one rank, not the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention.ulysses import Ulysses
from seqpar.comm.point_to_point import Rotation
from seqpar.mesh import Axis, Mesh
from seqpar.protocols import Attend, Core, state_dtype
from seqpar.shard import Tokens, check_tokens


def check(mesh: Mesh) -> None:
    """Raise `ValueError` on a mesh that this strategy does not use whole."""
    if mesh.ulysses.size > 1:
        raise ValueError(f"got strategy ring with ulysses={mesh.ulysses.size}, expected ulysses=1; use strategy usp")


def build(mesh: Mesh, tokens: Tokens, local: Core) -> Attend:
    """Attention for one token count: ulysses over an axis of one, around a ring."""
    check(mesh)
    check_tokens(tokens)
    return Ulysses(Ring(local, mesh.ring, tokens.sizes), mesh.ulysses, (tokens.sizes[mesh.ring.rank],))


class Ring:
    """A Core whose keys and values are spread over an axis, `sizes` tokens a rank. Owns two key-value blocks."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...]) -> None:
        self._local, self._axis, self._sizes = local, axis, sizes
        self._rotations: dict[tuple[object, ...], Rotation] = {}

    def __call__(self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, /) -> tuple[Tensor, Tensor]:
        """My queries against everybody's keys and values; see `seqpar.protocols.Core`."""
        if self._axis.size == 1:
            return self._local(q_BLHD, k_BLGD, v_BLGD)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BLHD, k_BLGD, v_BLGD)):
            raise ValueError("got inputs that require gradients, expected none: ring is for inference; use ulysses")
        rotation, groups = self._rotation(k_BLGD), k_BLGD.shape[2]
        box = rotation.outbox()
        box[:, :, :groups].copy_(k_BLGD.transpose(0, 1))
        box[:, :, groups:].copy_(v_BLGD.transpose(0, 1))
        out = lse = None
        for block in rotation.rotate():
            k, v = block.transpose(0, 1).split((groups, groups), dim=2)
            part, part_lse = self._local(q_BLHD, k, v)
            out, lse = merge(out, lse, part, part_lse)
        assert out is not None
        assert lse is not None
        return out.to(q_BLHD.dtype), lse

    def _rotation(self, k_BLGD: Tensor) -> Rotation:
        batch, _, groups, dim = k_BLGD.shape
        key = (batch, groups, dim, k_BLGD.dtype, k_BLGD.device)
        if key not in self._rotations:
            self._rotations[key] = Rotation(self._axis, self._sizes, (batch, 2 * groups, dim), k_BLGD)
        return self._rotations[key]


def merge(
    out_BLHD: Tensor | None, lse_BHL: Tensor | None, part_BLHD: Tensor, part_lse_BHL: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each, in fp32 (fp64 for fp64).

    With a = exp(lse), b = exp(part_lse): out = (a out + b part) / (a + b), lse = log(a + b), written so that nothing
    overflows: b / (a + b) = sigmoid(part_lse - lse).
    """
    part_BLHD = part_BLHD.to(state_dtype(part_BLHD.dtype))
    if out_BLHD is None or lse_BHL is None:
        return part_BLHD, part_lse_BHL.to(part_BLHD.dtype)
    step = part_lse_BHL.to(lse_BHL.dtype) - lse_BHL
    share_BLH1 = torch.sigmoid(step).transpose(1, 2)[..., None]
    return torch.lerp(out_BLHD, part_BLHD, share_BLH1), lse_BHL - F.logsigmoid(-step)
