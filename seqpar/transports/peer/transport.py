"""Peer memory: kernels write directly into the memory of the rank that will read, and flags signal completion.

The gain over NCCL is largest at small blocks, where launch and permutes cost more than moving the bytes.
`seqpar.transports.peer.exchange` has the protocol.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqpar.kernels.flags import Late
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.watch import Deadlines, Watch, drain
from seqpar.transports import _contract
from seqpar.transports._exchanges import Gather, Halo, HeadLayout, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports.peer.arena import first_reason, why_no_peers
from seqpar.transports.peer.blocks import PeerGather, PeerHalo, PeerRotation
from seqpar.transports.peer.exchange import PeerHeads, PeerKeyValues, PeerOverlappedKeyValues

T = TypeVar("T")
SETTLE_S = 0.01  # after its first number, the rest of a record is in host memory
TRIAL_S = 30.0  # deadline of the test exchange: longer than ranks need to compile the kernel of the flags
FACTS = _contract.Facts(
    rates={"cuda": "peer", "cpu": "peer"},
    unasked={"cuda": "GPUs that reach each other's memory"},
    preference=1,
    in_place=True,
)


def why_not(mesh: Mesh) -> str | None:
    """Return None if ranks that exchange are on one machine and reach each other's memory, otherwise the reason."""
    # every rank checks both axes, because a reason is shared only by the ranks of its axis
    reasons = [why_no_peers(axis, mesh.device) for axis in (mesh.sequence, mesh.cfg)]
    return next((reason for reason in reasons if reason is not None), None)


# by an axis's ranks: an axis would keep its group
_ANSWERS: dict[tuple[tuple[int, ...], torch.device], str | None] = {}


def why_not_tried(axis: Axis, device: torch.device) -> str | None:
    """Return None if the ranks of an axis reach each other's memory and a test exchange worked, otherwise the reason.

    Collective, with the same result on all ranks of the axis. The test exchanges one number per rank, because access
    over some buses lacks what flags need. It runs once for each axis and device.
    """
    key = axis.ranks or (axis.rank,), device
    if key not in _ANSWERS:
        _ANSWERS[key] = trial(axis, device)
    return _ANSWERS[key]


def trial(axis: Axis, device: torch.device) -> str | None:
    """Return the result of `why_not_tried` by a new test exchange."""
    reason = why_no_peers(axis, device)
    if reason is not None or axis.size == 1:
        return reason
    transport = Transport(TRIAL_S)
    reason = first_reason(axis, _tried(transport, axis, device))
    if reason is None:
        transport.release()
    return reason


def _tried(transport: Transport, axis: Axis, device: torch.device) -> str | None:
    try:
        collect = transport.gather(axis, (1,) * axis.size, (), torch.zeros((), dtype=torch.int64, device=device))
        collect.outbox().fill_(axis.rank)
        arrived = collect.deliver().tolist()
        transport.check()
    except (RuntimeError, TimeoutError) as error:
        return f"a test exchange failed: {str(error).splitlines()[0]}"
    expected = list(range(axis.size))
    return None if arrived == expected else f"a test exchange delivered {arrived}, expected {expected}"


@dataclass(eq=False)
class _Record:
    """State that a transport and its parts share.

    follows: the deadline is the watchdog's, which changes from call to call. late: the first wait that missed it. made:
    number -> (axis, contents, exchange), for exchanges that were not freed. count: of all exchanges ever made.
    """

    follows: bool
    deadline_s: float
    late: Late | None = None
    made: dict[int, tuple[Axis, str, Any]] = field(default_factory=dict)
    count: int = 0

    def begin(self, device: torch.device, watch: Watch | None) -> None:
        if self.follows and watch is not None:
            self.deadline_s = watch.limit_s
            watch.follow(self)
        self.late = Late.on(device, self.deadline_s)

    def limit(self, deadline_s: float) -> None:
        """Set the deadline of work that is queued from now on, if it is the watchdog's."""
        if self.follows and self.late is not None and deadline_s != self.deadline_s:
            self.deadline_s = deadline_s
            self.late.limit(deadline_s)


class Transport(_contract.Transport):
    """Makes exchanges through peer memory.

    All waits share one deadline, and one record of the first wait that missed it (`seqpar.kernels.flags.Late`).
    deadline_s: None follows the watchdog of the first axis, whose deadlines change from call to call.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        super().__init__()
        self._record = _Record(deadline_s is None, Deadlines().first_s if deadline_s is None else deadline_s)
        self._made: dict[int, tuple[Axis, str, Any]] = {}

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        both = PeerHeads(axis, layout, *self._next(layout.device))
        self._keep(axis, f"q, k, v and output of {_shown(layout)}", both)
        return both.to_heads, both.to_tokens

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        make = PeerOverlappedKeyValues if overlap else PeerKeyValues
        exchange = make(axis, layout, *self._next(layout.device))
        return self._keep(axis, f"keys and values of {_shown(layout)}", exchange)

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        rotation = PeerRotation(axis, sizes, shape, like, *self._next(like.device))
        return self._keep(axis, f"ring blocks of {sum(sizes)} tokens", rotation)

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        exchange = PeerGather(axis, sizes, shape, like, *self._next(like.device))
        return self._keep(axis, f"blocks of {sizes} x {shape}", exchange)

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        exchange = PeerHalo(axis, capacity, like, *self._next(like.device))
        return self._keep(axis, f"edges of at most {capacity} elements", exchange)

    def check(self) -> None:
        """Wait for the device; raise TimeoutError with the late rank if a wait timed out.

        Only this rank raises; the program that started the ranks must terminate the others.
        """
        record = self._record.late
        if record is not None:
            drain(self.watch, record.note.device, self.late)
        self.check_now()

    def late(self) -> str | None:
        """Return the error of the first wait that missed its deadline, or None; does not wait for the device."""
        record = self._record.late
        if record is None or not int(record.seen[0]):
            return None
        if record.note.is_cuda:
            time.sleep(SETTLE_S)
        number, behind, count = record.seen.tolist()
        axis, what, exchange = self._record.made[(number - 1) // 2]
        peers, ranks = exchange.all_flags[(number - 1) % 2].ranks, axis.ranks or tuple(range(axis.size))
        late = [ranks[peer] for bit, peer in enumerate(peers) if behind >> bit & 1]
        return (
            f"rank {ranks[axis.rank]}: timed out after {self._record.deadline_s:g} s waiting for rank "
            f"{', '.join(map(str, late))} (axis {axis.name}, exchange {count} of {what}): it crashed or hangs. See its "
            f"output."
        )

    def _release(self) -> None:
        """Free the arenas; nothing after a timeout, because the other ranks may never get here."""
        if self._record.late is None or not int(self._record.late.seen[0]):
            for number, (_, _, exchange) in self._made.items():
                exchange.arena.close()
                del self._record.made[number]
        self._separate()
        self._record = _Record(self._record.follows, self._record.deadline_s)

    def _separate(self) -> None:
        self._made = {}

    def _keep(self, axis: Axis, what: str, exchange: T) -> T:
        self._made[self._record.count] = self._record.made[self._record.count] = axis, what, exchange
        self._record.count += 1
        return exchange

    def _next(self, device: torch.device) -> tuple[Late, int]:
        """Return the shared record of late ranks and the number of the next exchange's first flags; each has two."""
        if self._record.late is None:
            self._record.begin(device, self.watch)
        assert self._record.late is not None
        return self._record.late, 2 * self._record.count


def _shown(layout: HeadLayout) -> str:
    return f"{sum(layout.tokens)} tokens, {layout.heads} heads, batch {layout.batch}"
