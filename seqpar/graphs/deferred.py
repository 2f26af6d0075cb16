"""`Promise`: a result that is computed when it is first read.

Guided pipelines call their transformer twice a step, and the first call does not know the inputs of the second. With a
`cfg` axis the first call therefore returns promises. If the second call comes before a promise is read, the two
branches are computed at the same time by the two halves of the ranks. If the first result is read earlier, or the
second call never comes because guidance is off, all ranks compute the first call then. Both are right; no option of a
pipeline has to be known.
When it wins: with two calls a step, on a mesh whose `cfg` axis has two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqpar.graphs.signature import Form

# what can be asked of a promise without its values
_SHAPE = {
    torch.Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.requires_grad.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
}
# what returns views of the same memory, which are filled together with it
_VIEWS = {torch.Tensor.chunk, torch.Tensor.unbind, torch.Tensor.unsqueeze, torch.Tensor.squeeze, torch.Tensor.movedim}
_INDICES = (int, slice, type(None), type(...))


class Ticket:
    """The results of one call that are computed later: by `fulfil` when they are read, or given to `fill`."""

    def __init__(self, arguments: Form, results: Form, compute: Callable[[Form], Form]) -> None:
        """results: tensors that hold no values yet. compute: returns the results, on all ranks at the same time."""
        self.results, self._arguments, self._compute = results, arguments, compute
        self.error: str | None = None

    @property
    def arguments(self) -> Form | None:
        """Return the arguments of the call, or None once the results are there."""
        return self._arguments

    def fulfil(self) -> None:
        """Compute the results, if they are not there yet; every rank must do this at the same time."""
        if self.error is not None:
            raise RuntimeError(self.error)
        if self._arguments is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.fill(self._compute(self._arguments).tensors)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the results."""
        self._arguments = None
        for path, room in self.results.tensors.items():
            room.copy_(tensors[path])

    def cancel(self, error: str) -> None:
        """Raise `RuntimeError` where results that are not there yet are read."""
        if self._arguments is not None:
            self._arguments, self.error = None, error

    def promised(self) -> Form:
        """Return the results as tensors that fulfil this ticket when they are read."""
        return self.results.each(lambda x: _promise(x, self))


class Promise(Tensor):
    """A tensor whose values are computed by its ticket when they are first read; what is made of it is plain."""

    ticket: Ticket

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on plain tensors, after the tickets of all promises among its arguments."""
        named = kwargs or {}
        if func not in _SHAPE and _is_view(func, args):
            ticket = args[0].ticket
            views = func(plain(args[0], read=False), *args[1:], **named)
            return pytree.tree_map_only(Tensor, lambda x: _promise(x, ticket), views)
        if func not in _SHAPE:
            args, named = pytree.tree_map_only(Promise, plain, (args, named))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)


def plain(x: Tensor, read: bool = True) -> Tensor:
    """Return a tensor that is no promise; if it was one, its values are there from now on (unless `read` is False)."""
    if not isinstance(x, Promise):
        return x
    if read:
        x.ticket.fulfil()
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _promise(x: Tensor, ticket: Ticket) -> Tensor:
    promise = x.as_subclass(Promise)
    promise.ticket = ticket
    return promise


def _is_view(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a function only takes a view of one promise that is not fulfilled yet."""
    if not args or not isinstance(args[0], Promise) or args[0].ticket.arguments is None:
        return False
    if func is Tensor.__getitem__:
        return all(type(index) in _INDICES for index in (args[1] if isinstance(args[1], tuple) else (args[1],)))
    return func in _VIEWS
