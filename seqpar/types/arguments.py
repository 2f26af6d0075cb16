"""Checks of arguments of the library: each raises ValueError with the value and what is expected.

They run before anything is allocated or exchanged. Values that every rank takes from rank 0 are checked where all ranks
raise the error (`Mesh.on_all_ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_STEPS = 10_000  # denoising steps; the longest published schedules have 1,000
MOST_SIDE = 1 << 16  # pixels along a side of an image


def shown(value: object) -> str:
    """Return a short text of a value, with its type unless it is a plain number or text."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{type(value).__name__} {text}"


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise unless the value is a whole number from `least` to `most`; True and False are not numbers."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"got {name}={shown(value)}, expected a whole number from {least} to {most}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that is larger than any float
        return False


def check_real(name: str, value: object) -> None:
    if not is_number(value):
        raise ValueError(f"got {name}={shown(value)}, expected a finite number")


def check_kind(name: str, value: object, *kinds: type, expected: str) -> None:
    if not isinstance(value, kinds):
        raise ValueError(f"got {name}={shown(value)}, expected {expected}")


def is_not_finite(x: torch.Tensor) -> bool:
    """Return whether a tensor on the host has NaN or infinity; tensors on a device are not checked."""
    return x.device.type == "cpu" and x.is_floating_point() and not all(map(math.isfinite, x.flatten().tolist()))


def check_dtype(dtype: object) -> None:
    if dtype not in FLOATS:
        expected = ", ".join(str(each) for each in FLOATS)
        raise ValueError(f"got dtype={shown(dtype)}, expected one of {expected}")


def check_dense(name: str, value: object) -> None:
    """Raise unless the value is a plain tensor with data: no other layout, quantised or meta tensor, or numpy array."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"got {name} of type {type(value).__name__}, expected a tensor")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "quantised" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
        raise ValueError(f"got {name} as a tensor that is {kind}, expected a dense tensor with data; convert it first")


def check_floats(name: str, value: object) -> None:
    check_dense(name, value)
    assert isinstance(value, torch.Tensor)
    if value.dtype not in FLOATS:
        raise ValueError(f"got {name} of {value.dtype}, expected floating-point numbers; pass {name}.float()")


def check_named(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"got {name}={shown(value)}, expected a mapping of names to tensors")
    for key, x in value.items():
        check_dense(f"{name} {key}", x)
        if x.dim() == 0:
            raise ValueError(f"got {name} {key} of shape (), expected a row for each image")
    return value


def check_labels(name: str, labels: torch.Tensor, most: int) -> None:
    """Raise unless class labels are (B,) whole numbers from 0 to `most`, the number of the class "none"."""
    if labels.dim() != 1 or labels.dtype not in (torch.int64, torch.int32):
        dtype = str(labels.dtype).removeprefix("torch.")
        raise ValueError(f"got {name} of shape {tuple(labels.shape)}, {dtype}, expected (images,), int64")
    if not labels.numel():
        return
    least, largest = torch.stack(labels.aminmax()).tolist()  # one synchronization with the device
    if not 0 <= (label := least if least < 0 else largest) <= most:
        raise ValueError(f"got {name} {label}, expected 0 to {most - 1}, or {most} for no class")
