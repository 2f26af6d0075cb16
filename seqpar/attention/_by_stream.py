"""Keys and values in the order of the streams, for strategies that only move data.

Exchanges bring the tokens of all ranks rank after rank, [t0 i0 t1 i1 ...]. With several streams that is another order
on another number of ranks, so attention's sums round differently. Here k and v are brought to the order that they
have on one rank, [t0 t1 ... i0 i1 ...]; queries stay, because their rows do not depend on each other.
For exact mode. Cost: k and v are read and written once more, by one kernel each.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.attention._by_padding import ByPadding
from seqpar.attention._rooms import Rooms
from seqpar.mesh.shard import JointShard, Tokens
from seqpar.types.protocols import Core


def in_key_order(local: Core, tokens: Tokens, rank: int) -> Core:
    """Return a local attention for keys that arrive rank after rank, to be held in the order that `tokens` names.

    rank: the rank whose queries are passed, if not all are.
    """
    if isinstance(tokens, JointShard) and tokens.padding:
        return ByPadding(local, tokens, rank)
    if isinstance(tokens, JointShard) and tokens.by_stream and tokens.parts > 1 and len(tokens.streams) > 1:
        return ByStream(local, tokens)
    return local


class ByStream:
    """A Core whose keys and values arrive rank after rank, and are attended to stream after stream."""

    def __init__(self, local: Core, tokens: JointShard) -> None:
        self._local, self._rooms = local, Rooms(tokens.arrivals)

    def __call__(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        # the mask is in the order of the streams
        return self._local(q_BLHD, *self._rooms.ordered(k_BLGD, v_BLGD), mask_BL)
