"""Ring: queries stay, key-value blocks travel; partial results are merged by their log-sum-exp.

K and V of one block are one message; two blocks are in memory, never the sequence. Source: Ring Attention
(arXiv 2310.01889), ring self-attention (arXiv 2105.13120).
When it wins: fewer heads than ranks, memory for keys and values too small for the sequence, slow links hidden by long
attention. Its merge changes the rounding: close to one rank, not the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.ulysses import Ulysses
from seqpar.kernels.merge import merge
from seqpar.mesh import Axis, Mesh
from seqpar.protocols import Attend, Core
from seqpar.shard import Tokens, check_tokens
from seqpar.transports._contract import Rotation, Transport


def check(mesh: Mesh) -> None:
    """Raise `ValueError` on a mesh that this strategy does not use whole."""
    if mesh.ulysses.size > 1:
        raise ValueError(f"got strategy ring with ulysses={mesh.ulysses.size}, expected ulysses=1; use strategy usp")


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Attention for one token count: ulysses over an axis of one, around a ring."""
    check(mesh)
    check_tokens(tokens, mesh.sequence.size)
    ring = Ring(local, mesh.ring, tokens.sizes, transport)
    return Ulysses(ring, mesh.ulysses, (tokens.sizes[mesh.ring.rank],), transport, tokens.total)


class Ring:
    """A Core whose keys and values are spread over an axis, `sizes` tokens a rank. Owns two key-value blocks."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self._rotations: dict[tuple[object, ...], Rotation] = {}

    def __call__(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        """My queries against the keys and values of all ranks; see `seqpar.protocols.Core`.

        The mask is of the keys of all ranks: of each block the columns of the rank that owns it are used.
        """
        if self._axis.size == 1:
            return self._local(q_BLHD, k_BLGD, v_BLGD, mask_BL)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BLHD, k_BLGD, v_BLGD)):
            raise ValueError("got inputs that require gradients, expected none: ring is for inference; use ulysses")
        rotation, groups = self._rotation(k_BLGD), k_BLGD.shape[2]
        box = rotation.outbox()
        box[:, :, :groups].copy_(k_BLGD.transpose(0, 1))
        box[:, :, groups:].copy_(v_BLGD.transpose(0, 1))
        masks = (None,) * len(self._sizes) if mask_BL is None else mask_BL.split(self._sizes, dim=1)
        out = lse = None
        for step, (owner, block) in enumerate(rotation.rotate(), start=1):
            k, v = block.transpose(0, 1).split((groups, groups), dim=2)
            dtype = q_BLHD.dtype if step == self._axis.size else None  # fp32 between, the model's dtype at the end
            out, lse = merge(out, lse, *self._local(q_BLHD, k, v, masks[owner]), dtype=dtype)
        assert out is not None
        assert lse is not None
        return out, lse

    def _rotation(self, k_BLGD: Tensor) -> Rotation:
        batch, _, groups, dim = k_BLGD.shape
        key = (batch, groups, dim, k_BLGD.dtype, k_BLGD.device)
        if key not in self._rotations:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._rotations[key] = self._transport.ring(self._axis, self._sizes, (batch, 2 * groups, dim), k_BLGD)
        return self._rotations[key]
