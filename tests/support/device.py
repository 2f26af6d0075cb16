"""A device that computes on the CPU, but copies from and to the host, and reads by it, are seen: what ends a capture.

Tensors of the device claim to be on torch's "meta" device, the one for which torch needs no driver, and hold their
values on the CPU. Operations on tensors of both sides are errors, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
# operations of which a GPU's host has to wait for a size or a value
READS = {
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"),
    *("unique_consecutive", "unique_dim"),
}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
MAKERS = ("tensor", "as_tensor")  # what they make of numbers is copied to the device


class OnDevice(Tensor):
    """A tensor on the device. host: the same on the CPU. seen: what sees that the host reads it."""

    host: Tensor
    seen: Device

    @staticmethod
    def __new__(cls, values: Tensor, seen: Device) -> OnDevice:
        like = {"dtype": values.dtype, "layout": values.layout, "device": DEVICE}
        strides = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, values.shape, **like, **strides)  # pyright: ignore
        made.host, made.seen = values, seen
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor on the device, outside of it")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    # torch's own are refused for subclasses, and for "meta"

    def _read(self) -> Tensor:
        self.seen.ends("the host reads values")
        return self.host

    def item(self) -> Any:
        return self._read().item()

    def tolist(self) -> Any:
        return self._read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._read().numpy(force=force)

    def new_tensor(self, data: Any, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=DEVICE)

    def __bool__(self) -> bool:
        return bool(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __index__(self) -> int:
        return self._read().__index__()


@dataclass
class Captured:
    """A capture; a replay runs the function again, and writes into the results of the first run."""

    work: Callable[[], Any]
    results: Any

    def replay(self) -> None:
        for result, value in zip(*map(pytree.tree_leaves, (self.results, self.work())), strict=True):
            if isinstance(result, Tensor):
                result.copy_(value)

    def release(self) -> None:
        pass


class Device(TorchDispatchMode):
    """The device, as a context. captures: whether what a CUDA graph cannot hold is a RuntimeError, as in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = False

    def ends(self, reason: str) -> None:
        if self.captures:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")

    def capture(self, work: Callable[[], Any], warm_up: int) -> Captured:
        """Capture a call; see `seqpar.graphs.graphs.Capture`."""
        for _ in range(warm_up):
            work()
        self.captures = True
        try:
            return Captured(work, pytree.tree_map_only(Tensor, lambda x: torch.full_like(x, torch.nan), work()))
        finally:
            self.captures = False

    def moved(self, value: Any) -> Any:
        """Return nested values with their tensors on the device."""
        return pytree.tree_map_only(Tensor, lambda x: OnDevice(x, self), value)

    def take(self, module: nn.Module) -> nn.Module:
        """Move the weights and buffers of a module here, as `nn.Module.to` does, and nothing else that it holds."""
        for part in module.modules():
            for name, weight in part._parameters.items():
                if weight is not None:
                    part._parameters[name] = nn.Parameter(self.moved(weight.data), requires_grad=False)
            for name, buffer in part._buffers.items():
                part._buffers[name] = self.moved(buffer)
        return module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name.partition("::")[2], dict(kwargs or {})
        if name == "_fused_sdp_choice":
            return 0  # by its formula, whose operations are seen here
        tensors = [x for x in pytree.tree_leaves((args, options)) if isinstance(x, Tensor)]
        inside = [x for x in tensors if isinstance(x, OnDevice)]
        is_inside = bool(inside)
        if (device := options.get("device")) is not None:
            is_inside = torch.device(device) == DEVICE
            options["device"] = torch.device("cpu")
        if name in ("_to_copy", "copy_"):
            if name == "copy_":
                is_inside = isinstance(args[0], OnDevice)
            if any(isinstance(x, OnDevice) != is_inside and x.numel() for x in tensors):
                self.ends(f"a copy of {tuple(tensors[-1].shape)} between host and device")
        elif inside:
            self._check(name, args, options, tensors)
        out = func(*pytree.tree_map_only(OnDevice, _host, args), **pytree.tree_map_only(OnDevice, _host, options))
        if not is_inside:
            return out
        same = {id(x.host): x for x in inside}  # what is written in place stays the object that it was
        return pytree.tree_map_only(Tensor, lambda x: same[id(x)] if id(x) in same else OnDevice(x, self), out)

    def _check(self, name: str, args: Any, options: Mapping[str, Any], tensors: list[Tensor]) -> None:
        indices = [x for x in args[1] if x is not None] if name in INDEXING else []
        if name in READS or (name == "repeat_interleave" and options.get("output_size") is None):
            self.ends(f"{name} waits for values")
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            self.ends("an index of bools waits for values")
        if any(not isinstance(x, OnDevice) for x in indices):
            self.ends("an index on the host is copied")
        # a number on the host is an argument of a kernel
        others = [
            x for x in tensors if not isinstance(x, OnDevice) and x.dim() and all(x is not one for one in indices)
        ]
        if others:
            raise RuntimeError(f"{name}: expected all tensors on one device, got {tuple(others[0].shape)} on the host")


def _host(x: OnDevice) -> Tensor:
    return x.host


@contextmanager
def device() -> Iterator[Device]:
    """Yield the device; torch's functions that know "meta", and do otherwise than on a GPU, are replaced meanwhile."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch, Device() as here:

        def maker(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def make(*args: Any, device: Any = None, **options: Any) -> Tensor:
                to = args[0].device if isinstance(args[0], OnDevice) and device is None else device
                made = own(*args, **options)
                return made if to is None else made.to(to)

            return make

        for name in MAKERS:
            patch.setattr(torch, name, maker(getattr(torch, name)))
        patch.setattr(torch, "autocast", lambda device_type, *args, **options: autocast("cpu", *args, **options))
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: enabled("cpu"))
        yield here
