"""`DeferredResult`: a result that is computed when it is first read.

Guided pipelines call their transformer twice per step, and the first call does not know the inputs of the second. With
a `cfg` axis the first call therefore returns deferred results. If the second call comes before they are read, the two
halves of the ranks compute one branch each, concurrently. If they are read earlier, or the second call never comes
because guidance is off, all ranks compute the first call then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqpar.graphs.signature import Form

# what a deferred result answers without its values
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
# these return views of the same memory, which is filled with the result's
_VIEWS = {torch.Tensor.chunk, torch.Tensor.unbind, torch.Tensor.unsqueeze, torch.Tensor.squeeze, torch.Tensor.movedim}
_INDICES = (int, slice, type(None), type(...))


class DeferredCall:
    """One call whose results are computed later: by `compute` when they are read, or set by `fill`.

    arguments: those of the call, None once the results are set. results: tensors that hold no values before.
    """

    def __init__(self, arguments: Form, results: Form, compute: Callable[[Form], Form]) -> None:
        """compute: returns the results; collective."""
        self.arguments: Form | None = arguments
        self.results, self._compute = results, compute
        self._error: str | None = None

    def compute(self) -> None:
        """Compute the results, unless they are set; collective."""
        if self._error is not None:
            raise RuntimeError(self._error)
        if self.arguments is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.fill(self._compute(self.arguments).tensors)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self.arguments = None
        for path, result in self.results.tensors.items():
            result.copy_(tensors[path])

    def cancel(self, error: str) -> None:
        """Raise `RuntimeError` where results that are not set are read from now on."""
        if self.arguments is not None:
            self.arguments, self._error = None, error

    def deferred(self) -> Form:
        """Return the results as tensors that compute this call when they are read."""
        return self.results.each(lambda x: _deferred(x, self))


class DeferredResult(Tensor):
    """A tensor computed on first read. Views stay deferred; other operations return plain tensors."""

    call: DeferredCall

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func not in _SHAPE and _is_view(func, args):
            call = args[0].call
            views = func(plain(args[0], read=False), *args[1:], **options)
            return pytree.tree_map_only(Tensor, lambda x: _deferred(x, call), views)
        if func not in _SHAPE:
            args, options = pytree.tree_map_only(DeferredResult, plain, (args, options))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)


def plain(x: Tensor, read: bool = True) -> Tensor:
    """Return a tensor that is not deferred; its values are computed, unless `read` is False."""
    if not isinstance(x, DeferredResult):
        return x
    if read:
        x.call.compute()
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _deferred(x: Tensor, call: DeferredCall) -> Tensor:
    deferred = x.as_subclass(DeferredResult)
    deferred.call = call
    return deferred


def _is_view(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    if not args or not isinstance(args[0], DeferredResult) or args[0].call.arguments is None:
        return False
    if func is Tensor.__getitem__:
        return all(type(index) in _INDICES for index in (args[1] if isinstance(args[1], tuple) else (args[1],)))
    return func in _VIEWS
