"""Flags between ranks that write each other's memory: "what you will read is there", told and waited for on the device.

When it wins: an exchange without a collective and without the host, so a CUDA graph replays it. Flags count: a rank
tells its peers how often it has told them, a reader waits until the count is high enough, so nothing is ever reset and
a fast rank does no harm. Telling is a release, waiting an acquire, at system scope: what this stream wrote before is
visible to whoever has seen the flag. A wait ends at a deadline and leaves a note of who was late.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.kernels._triton import compiled, fused, jit, tl, triton

NANOSECONDS = 10**9
A_SECOND = 1000  # looks that stand for a second where there is no timer, in Triton's interpreter
LOOKS = tl and tl.constexpr(1024)  # at the flags between two at the clock: about a millisecond


class Late(NamedTuple):
    """What is known of the first wait that was in vain: zeros, where none was. Shared by all flags of an engine.

    note: (3,) int64 on the device: 1 + number of the flags, for each peer a bit, the wait's count.
    """

    note: Tensor
    deadline_s: float

    @staticmethod
    def on(device: torch.device, deadline_s: float) -> Late:
        """Nobody is late yet."""
        return Late(torch.zeros(3, dtype=torch.int64, device=device), deadline_s)


@dataclass(frozen=True)
class Flags:
    """One direction of telling, between this rank and some peers. All counters are int64 and begin at zero.

    theirs: for each peer the flag in its memory that I raise, 0-d views. addresses: of these, on the device.
    mine: the flags that peers raise here, (n,). counts: (4,), how often I told, how often I waited, how many programs
    of a kernel that tells and waits by itself are done, and a time that its threads agree on.
    late: where the first wait in vain is noted, under this number. ranks: whom I wait for, as numbered on the axis.
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
        """Over these flags, with new counters."""
        addresses = torch.tensor([flag.data_ptr() for flag in theirs], dtype=torch.int64).to(mine.device)
        return Flags(theirs, addresses, mine, mine.new_zeros(4), late, number, ranks)

    def tell(self) -> None:
        """Raise my flag at every peer."""
        _run(self, True, False)

    def wait(self) -> None:
        """Wait until every peer has told me as often as I have waited, this time included."""
        _run(self, False, True)

    def meet(self) -> None:
        """Tell, then wait."""
        _run(self, True, True)


def _run(flags: Flags, tell: bool, wait: bool) -> None:
    (launch if fused(flags.mine) else reference)(flags, tell, wait)


def reference(flags: Flags, tell: bool, wait: bool) -> None:
    """The same on the host, for ranks whose memory is the host's."""
    if tell:
        flags.counts[0] += 1
        for flag in flags.theirs:
            flag.copy_(flags.counts[0])
    if not wait:
        return
    flags.counts[1] += 1
    wanted, end = int(flags.counts[1]), time.monotonic() + flags.late.deadline_s
    while int(flags.mine.min()) < wanted:
        if int(flags.late.note[0]):  # who was late once ends the run: nobody is waited for, or blamed, after that
            return
        if time.monotonic() > end:
            behind = sum(1 << peer for peer, count in enumerate(flags.mine.tolist()) if count < wanted)
            flags.late.note.copy_(torch.tensor([flags.number + 1, behind, wanted]))
            return
        time.sleep(0)  # a rank on the same core may be the one that is waited for


def launch(flags: Flags, tell: bool, wait: bool) -> None:
    """The same by the kernel."""
    flags_kernel[(1,)](*meeting(flags), tell, wait, num_warps=1)


def meeting(flags: Flags | None) -> tuple[tuple[Tensor | int, ...] | None, int, bool]:
    """What `exchange` and `last_meets` take: tensors and numbers, lanes (one a peer), whether there is a timer."""
    if flags is None:
        return None, 1, True
    timer, peers = compiled(exchange), len(flags.theirs)
    budget = int(flags.late.deadline_s * (NANOSECONDS if timer else A_SECOND))
    data = (flags.addresses, flags.mine, flags.counts, flags.late.note, flags.number + 1, peers, budget)
    return data, triton.next_power_of_2(peers), timer


@jit
def flags_kernel(flags, LANES: tl.constexpr, TIMER: tl.constexpr, TELL: tl.constexpr, WAIT: tl.constexpr):
    """One program, one lane a peer."""
    exchange(flags, LANES, TELL, WAIT, TIMER)


@jit
def last_meets(flags, programs, LANES: tl.constexpr, TIMER: tl.constexpr):
    """At the end of a kernel that writes into peers' memory: the last of its programs to come here tells the peers and
    waits for them. What comes after the kernel finds what they wrote; no launch of its own, so none to wait for.

    Every program's stores happen before it counts itself (release; the barrier: those of all its threads), all counts
    before the last program goes on (acquire), that before it raises flags.
    """
    tl.debug_barrier()
    done = flags[2] + 2
    before = tl.atomic_add(done, tl.full((), 1, tl.int64), sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.store(done, tl.zeros((), tl.int64))  # for the next launch, which begins after this one
        exchange(flags, LANES, True, True, TIMER)


@jit
def exchange(flags, LANES: tl.constexpr, TELL: tl.constexpr, WAIT: tl.constexpr, TIMER: tl.constexpr):
    """Tell, wait, or both: what a program does, and one only. flags: see `meeting`."""
    addresses, mine, counts, note, number, count, budget = flags
    lane = tl.arange(0, LANES)
    here = lane < count
    if TELL:
        told = tl.load(counts) + 1
        place = tl.load(addresses + lane, here, 0).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(place, tl.full((LANES,), 0, tl.int64) + told, here, sem="release", scope="sys")
        tl.store(counts, told)
    if WAIT:
        wanted = tl.load(counts + 1) + 1
        # who was late once ends the run: nobody is waited for, or blamed, after that
        clean = tl.load(note) == 0
        left = tl.where(clean, budget, 0).to(tl.int64)
        polls = tl.zeros((), tl.int64)
        start = polls
        spent = polls
        behind = here & (
            tl.atomic_add(mine + lane, tl.zeros((LANES,), tl.int64), here, sem="acquire", scope="sys") < wanted
        )
        missing = tl.sum(behind.to(tl.int32), 0)
        while (missing > 0) & (spent < left):  # pyright: ignore[reportOperatorIssue]
            seen = tl.atomic_add(mine + lane, tl.zeros((LANES,), tl.int64), here, sem="acquire", scope="sys")
            behind = here & (seen < wanted)
            missing = tl.sum(behind.to(tl.int32), 0)
            polls += 1
            if not TIMER:
                spent = polls
            elif polls % LOOKS == 0:  # seldom: a time for all takes longer than a look
                now = _now(counts + 3)
                start = tl.where(polls == LOOKS, now, start)
                spent = now - start
        if clean & (missing > 0):  # pyright: ignore[reportOperatorIssue]
            bit = tl.full((LANES,), 1, tl.int64) << lane
            tl.store(note + 1, tl.sum(tl.where(behind, bit, 0), 0))
            tl.store(note + 2, wanted)
            tl.store(note, tl.zeros((), tl.int64) + number)
        tl.store(counts + 1, wanted)


@jit
def _now(cell):
    """The first thread's time, for all warps: one that left the loop by its own clock would not come to its barriers.

    What an atomic returns is passed on to all threads.
    """
    tl.store(cell, tl.extra.cuda.globaltimer())  # pyright: ignore[reportAttributeAccessIssue]
    return tl.atomic_add(cell, tl.zeros((), tl.int64))
