"""K/V gather: queries stay, every rank gets all keys and values in one exchange.

Moves data and changes no arithmetic: the output has the bits of one rank. No rule about heads, no output exchange.
When it wins: two ranks on the sequence (the bytes of ulysses with one synchronisation instead of two), few
key-value heads, head counts that do not divide. From four ranks on it moves more than ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.comm.point_to_point import Gather
from seqpar.kernels.prepare import prepare, prepare_into
from seqpar.mesh import Axis, Mesh
from seqpar.protocols import Attend, Core, Outbox, Outboxes, Prepare
from seqpar.shard import Tokens, check_tokens


def check(mesh: Mesh) -> None:
    """Any mesh: ring and ulysses axes are used as one."""


def build(mesh: Mesh, tokens: Tokens, local: Core) -> Attend:
    """Attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size)
    return KVGather(local, mesh.sequence, tokens.sizes)


@dataclass(frozen=True)
class _Buffers:
    q_lBHD: Tensor
    exchange: Gather
    outboxes: Outboxes


class KVGather:
    """A local attention of my queries over everybody's keys and values. Owns its buffers (see `Attend`)."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...]) -> None:
        self._local, self._axis, self._sizes = local, axis, sizes
        self._buffers: dict[tuple[object, ...], _Buffers] = {}

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
        """See `seqpar.protocols.Attend`."""
        if self._axis.size == 1:
            return self._local(*prepare(q_BlHD, k_BlGD, how), v_BlGD)[0]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BlHD, k_BlGD, v_BlGD)):
            raise ValueError(
                "got inputs that require gradients, expected none: kv_gather is for inference; use ulysses"
            )
        buffers, groups = self._for(q_BlHD, k_BlGD), k_BlGD.shape[2]
        prepare_into(q_BlHD, k_BlGD, v_BlGD, how, buffers.outboxes)
        k, v = buffers.exchange.deliver().transpose(0, 1).split((groups, groups), dim=2)
        return self._local(buffers.q_lBHD.transpose(0, 1), k, v)[0]

    def _for(self, q_BlHD: Tensor, k_BlGD: Tensor) -> _Buffers:
        (batch, mine, heads, dim), groups = q_BlHD.shape, k_BlGD.shape[2]
        key = (batch, heads, groups, dim, q_BlHD.dtype, q_BlHD.device)
        if key not in self._buffers:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                exchange = Gather(self._axis, self._sizes, (batch, 2 * groups, dim), k_BlGD)
                q_lBHD = q_BlHD.new_empty(mine, batch, heads, dim)
                k, v = exchange.outbox().split((groups, groups), dim=2)
                box = Outbox(q_lBHD, k, v, heads=slice(0, heads), kv_heads=slice(0, groups))
                self._buffers[key] = _Buffers(q_lBHD, exchange, Outboxes([box]))
        return self._buffers[key]
