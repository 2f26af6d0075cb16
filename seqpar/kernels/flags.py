"""Flags between ranks that write each other's memory; on the device they say that the data is there to be read.

Exchanges need neither a collective nor the host, so a CUDA graph can replay them. A flag is a
counter: a rank raises its flag at other ranks ("peers" below) by one each time, and a reader waits until the count is
high enough. So nothing is ever reset, and a rank may run ahead. Raising a flag is a release and waiting for it an
acquire, at system scope: a rank that has seen a flag also sees what the other rank's stream wrote before. A wait ends
at a deadline and records which ranks were late.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.kernels._triton import compiled, fused, jit, tl, triton

NANOSECONDS = 10**9
A_SECOND = 1000  # reads of the flags that count as a second in Triton's interpreter, which has no timer
NANOSECONDS_A_LOOK = tl.constexpr(NANOSECONDS // A_SECOND)
LOOKS_ON_HOST, PAUSE_S = 16, 50e-6  # on CPUs a rank rests between looks after so many
LOOKS = tl.constexpr(1024)  # reads of the flags between two reads of the clock: about a millisecond


class Late(NamedTuple):
    """The record of the first wait that missed its deadline, and the deadline. All flags of a transport share it.

    note: (2,) int64 on the device: 1 + number of the late flags, 0 as long as no wait has missed its deadline; and the
    deadline in nanoseconds, which kernels read, so that it can change between replays of a CUDA graph. seen: (3,) int64
    in host memory, where the host reads it while the device computes: 1 + number of the flags, one bit for each late
    peer, the count that the wait needed.
    """

    note: Tensor
    seen: Tensor

    @staticmethod
    def on(device: torch.device, deadline_s: float) -> Late:
        seen = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        late = Late(torch.zeros(2, dtype=torch.int64, device=device), seen)
        late.limit(deadline_s)
        return late

    def limit(self, deadline_s: float) -> None:
        """Set the deadline of the waits that are queued on the current stream from now on."""
        self.note[1:].fill_(int(deadline_s * NANOSECONDS))


@dataclass(frozen=True)
class Flags:
    """The flags of one kind of message between this rank and some peers. All counters are int64 and begin at zero.

    theirs: for each peer the flag in its memory that this rank raises, 0-d views. addresses: their addresses, on the
    device. mine: the flags that peers raise in this rank's memory, (n,). counts: (4,): how often this rank told, how
    often it waited, how many programs of a kernel that tells and waits itself are done, and a time that all threads of
    a program use. late: the record of the first wait that misses its deadline; number: the number of these flags there.
    ranks: the ranks that this rank waits for, as numbered on the axis.
    """

    theirs: tuple[Tensor, ...]
    addresses: Tensor
    mine: Tensor
    counts: Tensor
    late: Late
    number: int
    ranks: tuple[int, ...]

    @staticmethod
    def of(theirs: tuple[Tensor, ...], mine: Tensor, late: Late, number: int, ranks: tuple[int, ...]) -> Flags:
        addresses = torch.tensor([flag.data_ptr() for flag in theirs], dtype=torch.int64).to(mine.device)
        return Flags(theirs, addresses, mine, mine.new_zeros(4), late, number, ranks)

    def tell(self) -> None:
        """Raise this rank's flag at every peer."""
        _run(self, True, False)

    def wait(self) -> None:
        """Wait until every peer has told this rank as often as it has waited, this time included."""
        _run(self, False, True)

    def meet(self) -> None:
        """Tell, then wait."""
        _run(self, True, True)


def _run(flags: Flags, tell: bool, wait: bool) -> None:
    (launch if fused(flags.mine) else reference)(flags, tell, wait)


def reference(flags: Flags, tell: bool, wait: bool) -> None:
    if tell:
        flags.counts[0] += 1
        for flag in flags.theirs:
            flag.copy_(flags.counts[0])
    if not wait:
        return
    flags.counts[1] += 1
    wanted, end = int(flags.counts[1]), time.monotonic() + int(flags.late.note[1]) / NANOSECONDS
    for looks in count():
        # after the first late rank the run must end: later waits neither wait nor record
        if int(flags.mine.min()) >= wanted or int(flags.late.note[0]):
            return
        if time.monotonic() > end:
            behind = sum(1 << peer for peer, counted in enumerate(flags.mine.tolist()) if counted < wanted)
            flags.late.seen.copy_(torch.tensor([flags.number + 1, behind, wanted]))
            flags.late.note[0] = flags.number + 1
            return
        # let other ranks run: the late rank may share this core, and a rank that looks all the time takes half of it
        time.sleep(0 if looks < LOOKS_ON_HOST else PAUSE_S)


def launch(flags: Flags, tell: bool, wait: bool) -> None:
    flags_kernel[(1,)](*meeting(flags), tell, wait, num_warps=1)


def meeting(flags: Flags | None) -> tuple[tuple[Tensor | int, ...] | None, int, bool]:
    """Return the arguments of `exchange` and `last_meets`: data, lanes (one for each peer), whether a timer exists."""
    if flags is None:
        return None, 1, True
    timer, peers = compiled(exchange), len(flags.theirs)
    data = (flags.addresses, flags.mine, flags.counts, flags.late.note, flags.late.seen, flags.number + 1, peers)
    return data, triton.next_power_of_2(peers), timer


@jit
def flags_kernel(flags, LANES: tl.constexpr, TIMER: tl.constexpr, TELL: tl.constexpr, WAIT: tl.constexpr):
    exchange(flags, LANES, TELL, WAIT, TIMER)


@jit
def last_meets(flags, programs, LANES: tl.constexpr, TIMER: tl.constexpr):
    """Tell the peers and wait for them in the last program of a kernel that writes into their memory.

    Every program calls this at its end; the last one to arrive tells and waits. The next kernel then finds what the
    peers wrote, without a launch in between. Memory order: a program's stores come before it counts itself (a release,
    after a barrier of its threads), all counts before the last program continues (an acquire), and that before it
    raises the flags.
    """
    tl.debug_barrier()
    done = flags[2] + 2
    before = tl.atomic_add(done, tl.full((), 1, tl.int64), sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.store(done, tl.zeros((), tl.int64))  # reset for the next launch, which begins after this one
        exchange(flags, LANES, True, True, TIMER)


@jit
def exchange(flags, LANES: tl.constexpr, TELL: tl.constexpr, WAIT: tl.constexpr, TIMER: tl.constexpr):
    """Signal, wait, or both; only one program may call this. flags: of `meeting`."""
    addresses, mine, counts, note, seen, number, count = flags
    lane = tl.arange(0, LANES)
    here = lane < count
    if TELL:
        signal = tl.load(counts) + 1
        place = tl.load(addresses + lane, here, 0).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(place, tl.full((LANES,), 0, tl.int64) + signal, here, sem="release", scope="sys")
        tl.store(counts, signal)
    if WAIT:
        wanted = tl.load(counts + 1) + 1
        # after the first late rank the run must end: later waits neither wait nor record
        clean = tl.load(note) == 0
        budget = tl.load(note + 1)
        left = tl.where(clean, budget if TIMER else budget // NANOSECONDS_A_LOOK, 0).to(tl.int64)
        polls = tl.zeros((), tl.int64)
        start = polls
        spent = polls
        behind = here & (
            tl.atomic_add(mine + lane, tl.zeros((LANES,), tl.int64), here, sem="acquire", scope="sys") < wanted
        )
        missing = tl.sum(behind.to(tl.int32), 0)
        while (missing > 0) & (spent < left):  # pyright: ignore[reportOperatorIssue]
            behind = here & (
                tl.atomic_add(mine + lane, tl.zeros((LANES,), tl.int64), here, sem="acquire", scope="sys") < wanted
            )
            missing = tl.sum(behind.to(tl.int32), 0)
            polls += 1
            if not TIMER:
                spent = polls
            elif polls % LOOKS == 0:  # seldom, because a common time for all threads takes longer than a read
                now = _now(counts + 3)
                start = tl.where(polls == LOOKS, now, start)
                spent = now - start
        if clean & (missing > 0):  # pyright: ignore[reportOperatorIssue]
            bit = tl.full((LANES,), 1, tl.int64) << lane
            tl.store(seen + 1, tl.sum(tl.where(behind, bit, 0), 0))
            tl.store(seen + 2, wanted)
            tl.store(note, tl.zeros((), tl.int64) + number)
            tl.store(seen, tl.zeros((), tl.int64) + number)
        tl.store(counts + 1, wanted)


@jit
def _now(cell):
    """Return the first thread's time in all warps: a warp that left the loop by its own clock would miss barriers.

    Triton passes the result of a scalar atomic on to all threads.
    """
    tl.store(cell, tl.extra.cuda.globaltimer())  # pyright: ignore[reportAttributeAccessIssue]
    return tl.atomic_add(cell, tl.zeros((), tl.int64))
