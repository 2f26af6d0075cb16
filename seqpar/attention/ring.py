"""Ring: queries stay on their rank, key-value blocks travel, and partial results are merged by their log-sum-exp.

K and V of a block are one message. A rank keeps two blocks in memory, never the keys and values of the whole sequence.
Source: Ring Attention (arXiv 2310.01889), ring self-attention (arXiv 2105.13120).
Use it if there are fewer heads than ranks, the keys and values of the whole sequence do not fit into memory, or
attention takes long enough to hide slow links. The merge rounds, so the output is close to one rank's but does not
have the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from seqpar.attention._streams import Beside
from seqpar.attention.ulysses import Ulysses, around
from seqpar.kernels.merge import merge
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import Rotation, Transport
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts, refuse
from seqpar.types.protocols import Attend, Core, output_dtype


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count: ulysses over an axis of one rank, around a ring."""
    refuse("ring", why_not(mesh.ring.size, mesh.ulysses.size, 0, 0))
    check_tokens(tokens, mesh.sequence.size, merges=True)
    ring = Ring(local, mesh.ring, tokens.sizes, transport)
    size, again = tokens.sizes[mesh.ring.rank], lambda other: build(mesh, other, local, transport)
    return Ulysses(ring, mesh.ulysses, (size,), tokens, transport, partial(transport.heads, mesh.ulysses), again)


class Ring:
    """A Core whose keys and values are sharded over an axis, sizes[r] tokens on rank r. Owns two key-value blocks."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self._rotations: dict[tuple[object, ...], Rotation] = {}

    def __call__(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        """Attend with local queries to the keys and values of all ranks, whose keys the mask covers."""
        return self.attend_beside(q_BLHD, k_BLGD, v_BLGD, mask_BL, None)

    def attend_beside(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None, beside: Beside | None, /
    ) -> tuple[Tensor, Tensor]:
        if self._axis.size == 1:
            if beside is not None:
                beside()
            return self._local(q_BLHD, k_BLGD, v_BLGD, mask_BL)
        rotation, groups = self._rotation(k_BLGD), k_BLGD.shape[2]
        box = rotation.outbox()
        box[:, :, :groups].copy_(k_BLGD.transpose(0, 1))
        box[:, :, groups:].copy_(v_BLGD.transpose(0, 1))
        masks = (None,) * len(self._sizes) if mask_BL is None else mask_BL.split(self._sizes, dim=1)
        out = lse = None
        for step, (owner, block) in enumerate(rotation.rotate(), start=1):
            if step == 1 and beside is not None:
                beside()
            k, v = block.transpose(0, 1).split((groups, groups), dim=2)
            last = step == self._axis.size  # fp32 until the last merge
            dtype = output_dtype(q_BLHD.dtype, q_BLHD.device) if last else None
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


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank in a ring; norm and rotary of q and k are a separate pass."""
    return around(at, rank, ring_layer(at, rank))


def ring_layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of a ring with the heads of one rank: one attention call for each block, N - 1 transfers.

    At step s a rank sends the block of the rank s places before it and receives that of the rank s + 1 places before
    it. A rank without heads does neither. Two packing kernels write k and v of the local block; memory holds two
    blocks.
    """
    row, (heads, groups), blocks, steps = rank // at.ulysses, at.heads(rank), at.blocks, range(at.ring - 1)
    calls = tuple(AttentionCall(blocks[row], blocks[(row - step) % at.ring], heads, groups) for step in range(at.ring))
    if at.ring == 1:
        return Layer((), calls if heads else (), (), 0)
    sizes = [blocks[(row - step) % at.ring] * 2 * groups for step in range(at.ring)]
    moves = tuple(Move(sizes[step], sizes[step + 1], min(groups, 1)) for step in steps)
    packing = (4 * blocks[row] * groups, 2)
    return Layer(moves, calls if heads else (), (packing,), 2 * max(sizes), merges=len(steps) if heads else 0)


def why_not(ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """Return the reason why a ring cannot use this mesh (it has no use for a ulysses axis), or None if it can."""
    return None if ulysses == 1 else f"ulysses={ulysses}, expected ulysses=1; use strategy usp"


FACTS = StrategyFacts(moves_only=False, order=50, axes=("ring",), layer=layer, why_not=why_not)
