"""`Forward`: what one forward of a split transformer has met so far; `Ranks`: what cuts, attention and gathers share.

The numbers of tokens are known only inside of a forward, after its patches are made. Each cut records them, and
attention, which comes later, reads them. All ranks get the same complete inputs, so that they find the same numbers,
and the same errors, without talking to each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import seqpar.local
from seqpar.adapter.cuts import CutTokens, GatherTokens
from seqpar.mesh import Axis, Mesh
from seqpar.planner.plan import Plan, choose_local, load_local, load_strategy, load_transport
from seqpar.protocols import Attend, plugin
from seqpar.shard import JointShard, Shard
from seqpar.transports import _contract

MOST = 16  # kinds of attention, and of gathers, whose exchanges are kept: new shapes must not fill the memory


@dataclass
class Forward:
    """One forward: the number of tokens of each stream, the key masks of streams, and masks in the order of the keys.

    converted: masks that attention was given, with their converted form; they are kept here, so that a mask that the
    next block passes again is found by its address.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    converted: dict[Hashable, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)


class Ranks:
    """The ranks of the sequence axis with their exchanges, which are made once for each split and shape."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.plan = mesh, plan
        self.now: Forward | None = None
        self.last = Forward()  # the forward that was started last, also after its end
        self._releases = 0
        self._moves = load_transport(plan.transport.name)
        self._attends: dict[tuple[JointShard, bool], Attend] = {}
        self._told: set[str] = set()
        self._gathers: dict[Hashable, _contract.Gather] = {}
        self._shapes: set[Hashable] = set()

    def __deepcopy__(self, memo: object) -> Ranks:
        raise ValueError(
            "got a copy of a transformer that runs on several ranks, expected one that does not: its exchanges belong "
            "to one transformer; release it first, or copy it before it is made parallel"
        )

    @property
    def axis(self) -> Axis:
        """Return the sequence axis."""
        return self.mesh.sequence

    @property
    def releases(self) -> int:
        """Return how often exchanges were freed; if too many are kept, on every rank alike, all are freed first.

        It is part of a body's state, which is read before each call. Graphs that read the exchanges are then not
        replayed any more, because the state changes with them. All are freed at once, as each change costs all graphs.
        """
        if max(len(self._shapes), len(self._gathers)) > MOST:
            self.release()
        return self._releases

    def begin(self) -> Forward:
        """Start a forward. It frees nothing: a graph that was found valid may be replayed after it."""
        self.now = self.last = Forward()
        return self.now

    def cut(self, x: Tensor, cut: CutTokens) -> Tensor:
        """Return this rank's tokens of a tensor, as a view, and record how many tokens there are."""
        if (cut.dims is not None and x.dim() != cut.dims) or self.now is None:
            return x
        total, parts = x.shape[cut.dim], self.axis.size
        if total == 1 < parts:
            return x
        name = cut.stream or str(total)
        known = self.now.lengths.setdefault(name, total)
        if total != known:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)} with {total} tokens of {name}, expected {known} as in other "
                f"tensors of {name}; check the plan's cuts"
            )
        if total < parts:
            raise ValueError(
                f"got {total} tokens of {name} for {parts} ranks, expected at least one a rank; use fewer ranks on "
                f"the sequence or a larger input"
            )
        mine = Shard(total, parts).slice(self.axis.rank)
        return x.narrow(cut.dim, mine.start, mine.stop - mine.start)

    def total(self, stream: str, use: str) -> int:
        """Return the number of tokens of a stream on all ranks; ValueError if none of it was cut yet."""
        if self.now is None or stream not in self.now.lengths:
            raise ValueError(f"got a gather of {stream} at {use} before any cut of it, expected a cut; check the plan")
        return self.now.lengths[stream]

    def gather(self, x: Tensor, gather: GatherTokens, use: str) -> Tensor:
        """Return a tensor with the tokens of all ranks; the next gather of this use overwrites it."""
        sizes = Shard(self.total(gather.stream, use), self.axis.size).sizes
        if x.shape[gather.dim] != sizes[self.axis.rank]:
            raise ValueError(
                f"got a gather at {use} of other tokens than each rank's share of the {sum(sizes)} of {gather.stream}, "
                f"expected these; check the plan's cuts"
            )
        if self.axis.size == 1:
            return x
        return self.rows(x.movedim(gather.dim, 0), sizes, use).movedim(0, gather.dim).contiguous()

    def rows(self, mine: Tensor, sizes: tuple[int, ...], use: str) -> Tensor:
        """Return the rows of all ranks, of which each has `sizes`; the next call of this use overwrites them."""
        key = (use, sizes, mine.shape[1:], mine.dtype)
        if key not in self._gathers:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._gathers[key] = self._moves.gather(self.axis, sizes, tuple(mine.shape[1:]), mine)
        exchange = self._gathers[key]
        exchange.outbox().copy_(mine)
        return exchange.deliver()

    def attend(self, tokens: JointShard, like: Tensor, masked: bool) -> Attend:
        """Return the planned strategy's attention for a split of tokens; it is built once and owns its buffers.

        like: its queries, or a tensor of their batch and dtype if nothing is masked. masked: whether it gets key masks;
        where the planned local attention takes none, another one computes those calls.
        """
        self._shapes.add((tokens, masked, len(like), like.dtype))  # an attention has buffers for each of these
        if (tokens, masked) not in self._attends:
            local = self._local(like, masked)
            build = load_strategy(self.plan.strategy.name).build
            self._attends[tokens, masked] = build(self.mesh, tokens, load_local(local), self._moves)
        return self._attends[tokens, masked]

    def _local(self, like: Tensor, masked: bool) -> str:
        name, inputs = self.plan.local.name, (like.device, like.dtype, like.shape[-1], masked)
        reason = plugin(seqpar.local, name, "local attention").why_not(*inputs) if masked else None
        if reason is None:
            return name
        other = choose_local("auto", *inputs).name
        if self.mesh.is_main and name not in self._told:
            self._told.add(name)
            warnings.warn(f"local attention {name} {reason}: {other} computes the masked attention", stacklevel=2)
        return other

    def abandon(self) -> None:
        """End the exchanges that an error in the last forward left unfinished."""
        self._moves.abandon()

    def check(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self._moves.check()

    def release(self) -> None:
        """Free all exchanges, on all ranks at the same time."""
        self._attends.clear()
        self._gathers.clear()
        self._shapes.clear()
        self._releases += 1
        self._moves.release()
