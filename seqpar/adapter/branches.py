"""`Branches`: splits the rows of calls over the mesh, and computes guidance's two calls of a step at the same time.

A call is promised (`seqpar.engine.promises`) where the next one is known to be its step's other branch. With two ranks
on the `cfg` axis each half then computes one of them.
When it wins: with guidance; without it all ranks share the tokens of one call (`parallelize(cfg=False)`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from seqpar.adapter.pairs import Pairs
from seqpar.adapter.rows import compute_rows, rows_of, split_over
from seqpar.engine.graphs import KINDS
from seqpar.engine.promises import Ticket
from seqpar.engine.signature import Form
from seqpar.inputs import shapes
from seqpar.mesh import Axis, Mesh
from seqpar.transports.collective.point_to_point import gather

BOTH = "cond_uncond"  # the label of a call whose rows are both branches of guidance
Compute = Callable[[Form], Form]


class Branches:
    """The results of a transformer's calls, each computed at once or beside the next one; see `results`.

    compute: computes a call with this rank's rows. check: compares the ranks before a promised call is computed alone.
    say: prints a message once, on rank 0.
    """

    def __init__(self, mesh: Mesh, compute: Compute, check: Callable[[], None], say: Callable[[str], None]) -> None:
        self._mesh, self._compute, self._check, self._say = mesh, compute, check, say
        self.pairs = Pairs()
        self._known: dict[Hashable, Form] = {}  # the results of kinds of calls, without values
        self._pending: Ticket | None = None
        self.version: Hashable = None  # of the module when the pending call was made, and what it showed then
        self.shown: Mapping[str, str] = {}

    @property
    def waiting(self) -> bool:
        """Return whether a promised call is not computed yet."""
        return self._pending is not None and self._pending.arguments is not None

    def settle(self) -> None:
        """Compute a call that was promised, before the module changes; every rank must call this at the same time."""
        if self._pending is not None:
            self._pending.fulfil()
        self._pending = None

    def cancel(self, error: str) -> None:
        """Raise `RuntimeError` with this message where the results of a promised call are read."""
        if self._pending is not None:
            self._pending.cancel(error)
        self._pending = None

    def whole(self, form: Form) -> Form:
        """Return the results of a call for which every rank computes all rows, because rows may depend on others."""
        self._fulfil()
        return self._by_rows(form, ())

    def results(self, form: Form, label: str | None, version: Callable[[], Hashable], shown: Mapping[str, str]) -> Form:
        """Return the results of a call, or promises of them where they may be computed beside the next call.

        label: the name that the pipeline gives to the call. version, shown: the module's state and texts of it, which
        must stay the same until a promised call is computed.
        """
        first = self._pending
        if first is not None and first.arguments is not None and self._alike(first, form):
            self._pending = None
            return self._both(first, first.arguments, form)
        self._fulfil()
        if not self._may_wait(form, label):
            return self._by_rows(form)
        self.version, self.shown = version(), shown
        self._pending = Ticket(form, self._known[form.kind].each(_room), self._alone)
        return self._pending.promised()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes with several ranks that can split a batch."""
        return tuple(axis for axis in (self._mesh.data, self._mesh.cfg) if axis.size > 1)

    def _fulfil(self) -> None:
        first, self._pending = self._pending, None
        if first is not None and first.arguments is not None:
            first.fulfil()

    def _may_wait(self, form: Form, label: str | None) -> bool:
        """Return whether a call may be computed later, beside the step's next one, which then is sure to come."""
        cfg = self._mesh.cfg
        if cfg.size == 1 or torch.is_autocast_enabled(self._mesh.device.type):
            return False
        split = split_over(self.axes, rows_of(form.whole))
        if label in (None, BOTH) and len(split) == len(self.axes):
            return False  # its rows are both branches
        if cfg not in split and self.pairs.lonely:
            self._say(
                "both halves of the cfg axis compute the same, because calls come without a second branch; "
                "parallelize(cfg=False) lets all ranks share the tokens"
            )
        return form.kind in self._known and self.pairs.expected

    def _alike(self, first: Ticket, form: Form) -> bool:
        """Return whether a call has results like those of the one before, so that both can be exchanged."""
        known = self._known.get(form.kind)
        mixed = torch.is_autocast_enabled(self._mesh.device.type)  # the first one was called without
        return not mixed and known is not None and shapes(known.tensors) == shapes(first.results.tensors)

    def _both(self, ticket: Ticket, first: Form, second: Form) -> Form:
        """Compute two calls at the same time, one on each half of the cfg axis; fulfil the first, return the second."""
        cfg = self._mesh.cfg
        mine = self._by_rows((first, second)[cfg.rank], (self._mesh.data,))
        both = {path: gather(x[None], cfg, (1, 1)) for path, x in mine.tensors.items()}
        ticket.fill({path: x[0] for path, x in both.items()})
        return mine.holding({path: x[1].clone() for path, x in both.items()})

    def _alone(self, form: Form) -> Form:
        """Compute a promised call that was read before a second one came."""
        self.pairs.alone()
        self._check()
        with torch.autocast(self._mesh.device.type, enabled=False):  # as it was called, wherever it is read
            return self._by_rows(form)

    def _by_rows(self, form: Form, axes: Sequence[Axis] | None = None) -> Form:
        """Compute a call, its rows split over the axes where there are enough."""
        whole = form.whole
        split = split_over(self.axes if axes is None else axes, rows_of(whole))
        results = compute_rows(whole, split, self._compute)
        if self._mesh.cfg.size > 1 and form.kind is not None and form.kind not in self._known:
            if len(self._known) == KINDS:
                del self._known[next(iter(self._known))]
            self._known[form.kind] = results.each(lambda x: x.new_empty(()).expand(x.shape))
        return results


def _room(like: Tensor) -> Tensor:
    """Return a tensor for results that are not there yet; NaN would show where it is read too early."""
    unknown = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, unknown, dtype=like.dtype, device=like.device)
