"""`Weight8`: a linear layer's weight that is in memory in 8 bits (e4m3, a scale a row), and reads as one of its dtype.

GEMMs in 8 bits take its values and scales as they are. Every other operation of torch gets the numbers for which they
stand, computed for it and freed afterwards, so that diffusers' modules, peft and hooks work with it unchanged.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from seqpar.kernels._triton import fused, jit, tl
from seqpar.kernels.rows8 import E4M3, INVERSE, rounded
from seqpar.types.protocols import state_dtype

CHUNK = 1 << 24  # numbers that are rounded at once: torch's functions need 12 bytes for each
BLOCK = 4096  # numbers of a row that a program rounds at once; it reads the row twice, the second time from the cache
CASES: tuple[dict[str, int], ...] = ({"rows": 3, "width": 48}, {"rows": 5, "width": 2064}, {"rows": 1, "width": 4096})
"""Shapes that tests use."""
aten = torch.ops.aten


def widened(values_FE: Tensor, scales_F: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers (F, E) for which values in e4m3 and their rows' scales stand, rounded once to a dtype."""
    launched = fused(values_FE) and dtype != torch.float64
    return (launch if launched else reference)(values_FE, scales_F, dtype)


def reference(values_FE: Tensor, scales_F: Tensor, dtype: torch.dtype) -> Tensor:
    wide = state_dtype(dtype)
    return (values_FE.to(wide) * scales_F.to(wide)[:, None]).to(dtype)


def launch(values_FE: Tensor, scales_F: Tensor, dtype: torch.dtype) -> Tensor:
    """Run the kernel: what `reference` returns. The last dim must be contiguous."""
    rows, width = values_FE.shape
    out = torch.empty((rows, width), dtype=dtype, device=values_FE.device)
    if out.numel():
        kernel[rows, -(-width // 2048)](values_FE, scales_F, out, values_FE.stride(0), width, BLOCK=2048, num_warps=4)
    return out


@jit
def kernel(values, scales, out, stride, width, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(values + row * stride + col, col < width).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * width + col, wide.to(out.dtype.element_ty), col < width)


def narrowed(weight_FE: Tensor, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 (F, E) and their scales (F,) in fp32, with the bits of `rounded`, in new memory or `into`."""
    if into is None:
        values = torch.empty(weight_FE.shape, dtype=E4M3, device=weight_FE.device)
        into = values, torch.empty(len(weight_FE), dtype=torch.float32, device=weight_FE.device)
    launched = fused(weight_FE) and torch.cuda.get_device_capability(weight_FE.device) >= (8, 9)
    (launch_narrowing if launched else reference_narrowing)(weight_FE, *into)
    return into


def reference_narrowing(weight_FE: Tensor, values_FE: Tensor, scales_F: Tensor) -> None:
    rows = max(1, CHUNK // max(1, weight_FE.shape[1]))
    for start in range(0, len(weight_FE), rows):
        here = slice(start, start + rows)
        values, scales = rounded(weight_FE[here].to(state_dtype(weight_FE.dtype)))
        values_FE[here].copy_(values)
        scales_F[here].copy_(scales.flatten())


def launch_narrowing(weight_FE: Tensor, values_FE: Tensor, scales_F: Tensor) -> None:
    """Run the kernel: the bits of `reference_narrowing` where all numbers are finite."""
    rows, width = weight_FE.shape
    if weight_FE.numel():
        weight_FE = weight_FE.contiguous()
        narrowing_kernel[(rows,)](
            weight_FE, values_FE, scales_F, values_FE.stride(0), width, INVERSE=INVERSE, BLOCK=BLOCK, num_warps=8
        )


@jit
def narrowing_kernel(x, values, scales, stride, width, INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, values = x + row * width, values + row * stride
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        top = tl.maximum(top, tl.abs(tl.load(x + start + col, start + col < width, 0.0).to(tl.float32)))
    scale = tl.max(top, 0) * INVERSE
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        wide = tl.load(x + start + col, start + col < width, 0.0).to(tl.float32)
        tl.store(values + start + col, tl.div_rn(wide, scale).to(values.dtype.element_ty), start + col < width)


class _Origin:
    # of all weights that share memory: what `Weight8` says of its source, for the whole of it
    def __init__(self, source: Callable[[], Tensor] | None, loaded: bool) -> None:
        self.source, self.loaded = source, loaded


class Weight8(Tensor):
    """A weight (F, E) of the dtype that it stands for, in memory as e4m3 (F, E) and scales (F,) in fp32.

    source: returns the weight before it was rounded, on any device; None where nothing can. loaded: whether the values
    are those of the model's files: neither written nor with LoRAs. What is written to it is rounded. Parts other than
    runs of rows are copies, so that a write to these does not reach it.
    """

    e4m3: Tensor
    scales: Tensor
    _origin: _Origin
    _place: slice | None  # of its rows in the source's

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        source: Callable[[], Tensor] | None = None,
        loaded: bool = True,
    ) -> Weight8:
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        with torch.inference_mode(False):  # weights outlive the caller's mode
            self = make(cls, values.shape, dtype=dtype, device=values.device)
        self.e4m3, self.scales, self._origin, self._place = values, scales, _Origin(source, loaded), None
        return self

    @staticmethod
    def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Weight8:
        """Return a weight whose numbers are to be written."""
        with torch.inference_mode(False):  # weights outlive the caller's mode
            values = torch.empty(*shape, dtype=E4M3, device=device)
            return Weight8(values, torch.empty(shape[0], dtype=torch.float32, device=device), dtype)

    @staticmethod
    def of(weight_FE: Tensor, source: Callable[[], Tensor] | None = None, loaded: bool = True) -> Weight8:
        """Return a weight in 8 bits, in new memory."""
        made = Weight8.empty(weight_FE.shape, weight_FE.dtype, weight_FE.device)
        made.write(weight_FE)
        made.came_from(source, loaded)
        return made

    def came_from(self, source: Callable[[], Tensor] | None, loaded: bool) -> None:
        """Set what the weight was before it was rounded, for all that share its memory."""
        self._origin.source, self._origin.loaded = source, loaded

    @property
    def source(self) -> Callable[[], Tensor] | None:
        return self._origin.source

    @property
    def loaded(self) -> bool:
        return self._origin.loaded

    @torch.no_grad()
    def write(self, weight_FE: Tensor) -> None:
        """Take the numbers of another weight, rounded first to this one's dtype and then to 8 bits."""
        narrowed(weight_FE.to(self.device).to(self.dtype), (self.e4m3, self.scales))

    def wide(self) -> Tensor:
        """Return the numbers for which it stands, in new memory."""
        return widened(self.e4m3, self.scales, self.dtype)

    def original(self) -> Tensor:
        """Return the weight before it was rounded, on its device; where nothing knows it, what it stands for."""
        if self.source is None:
            return self.wide()
        whole = self.source()
        return (whole if self._place is None else whole[self._place]).to(self.device, self.dtype)

    def like(self, values: Tensor, scales: Tensor) -> Weight8:
        """Return its numbers in other memory."""
        made = Weight8(values, scales, self.dtype, self.source, self.loaded)
        made._place = self._place
        return made

    def adopt(self, other: Weight8) -> None:
        """Have the memory of another weight of its shape from now on."""
        self.e4m3, self.scales, self._origin, self._place = other.e4m3, other.scales, other._origin, other._place

    def part(self, rows: slice) -> Weight8:
        """Return rows of it, of the same memory."""
        made = Weight8(self.e4m3[rows], self.scales[rows], self.dtype)
        here, start = range(len(self))[rows], 0 if self._place is None else self._place.start
        made._origin, made._place = self._origin, slice(start + here.start, start + here.stop)
        return made

    # Torch --------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__setitem__ and isinstance(args[0], Weight8):
                wide = args[0].wide()
                wide[args[1]] = args[2]
                return args[0].copy_(wide)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (known := HERE.get(func)) is not None and (result := known(*args, **kwargs)) is not NotImplemented:
            return result
        if func._schema.is_mutable and any(isinstance(x, Weight8) for each in args if type(each) is list for x in each):
            raise ValueError(f"{func} writes to a list of weights stored in 8 bits; write them one by one")
        plain_args, plain_kwargs = [_plain(x) for x in args], {name: _plain(x) for name, x in kwargs.items()}
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return result

        # in-place operations, and those with out=, have written to copies of these
        given = [*zip(args, plain_args, strict=True), *((kwargs[name], x) for name, x in plain_kwargs.items())]
        names = [argument.name for argument in func._schema.arguments]
        places = [*names[: len(args)], *kwargs]
        written = {x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write}
        back = result
        for name, (ours, plain) in zip(places, given, strict=True):
            if name in written and isinstance(ours, Weight8):
                _write(ours, plain)
                back = ours if result is plain else back
        return back

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wide().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Weight8:
        copy = self.like(self.e4m3.clone(), self.scales.clone())
        memo[id(self)] = copy = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return cast(Weight8, copy)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Weight8({tuple(self.shape)}, {self.dtype}, {self.device})"

    def data_ptr(self) -> NoReturn:
        """Refuse: what asks for an address would read numbers of another type."""
        raise ValueError(
            "A weight stored in 8 bits has no memory in its dtype. To save or share it, load the model without "
            'precision="fp8", or use seqpar convert'
        )

    def untyped_storage(self) -> NoReturn:
        """Refuse, as `data_ptr` does."""
        self.data_ptr()

    @property
    def data(self) -> Weight8:  # pyright: ignore[reportIncompatibleVariableOverride]
        return cast(Weight8, self.detach())

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, Weight8) and (other.dtype, other.device) == (self.dtype, self.device):
            _write(self, other)
            return
        other = other if isinstance(other, Weight8) else Weight8.of(other, None, False)
        Tensor.data.__set__(self, other)  # pyright: ignore[reportAttributeAccessIssue]
        self.adopt(other)


def read_as_tensors() -> AbstractContextManager[None]:
    """Return a context in which attributes of a `Weight8` are read as a tensor's, without its own code."""
    return torch._C.DisableTorchFunctionSubclass()


def in_memory(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a weight: its values and scales, or itself."""
    return (weight.e4m3, weight.scales) if isinstance(weight, Weight8) else (weight,)


def plain(weight: Tensor) -> Tensor:
    """Return a weight as a tensor that has memory in its dtype, for kernels that read it."""
    return weight.wide() if isinstance(weight, Weight8) else weight


def original(weight: Tensor) -> Tensor:
    """Return a weight before it was rounded to 8 bits, or a plain one as it is."""
    return weight.original() if isinstance(weight, Weight8) else weight


def _plain(value: Any) -> Any:
    if isinstance(value, Weight8):
        return value.wide()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _write(weight: Weight8, numbers: Tensor) -> None:
    if weight.shape != numbers.shape:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} cannot take numbers of {tuple(numbers.shape)}")
    weight.write(numbers)
    weight.came_from(None, False)


# What keeps the 8 bits; functions return NotImplemented for arguments that need the numbers -------------------------


def _same(weight: Weight8) -> Weight8:
    return weight.part(slice(None))


def _clone(weight: Weight8, **options: Any) -> Weight8:
    return weight.like(weight.e4m3.clone(), weight.scales.clone())


def _to(weight: Weight8, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    if dtype not in (None, weight.dtype):
        return NotImplemented
    to = weight.device if device is None else device
    values, scales = (x.to(to, non_blocking=non_blocking, copy=True) for x in (weight.e4m3, weight.scales))
    return weight.like(values, scales)


def _rows(weight: Weight8, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return weight.part(slice(start, end)) if dim in (0, -2) and step == 1 else NotImplemented


def _split(weight: Weight8, size: int, dim: int = 0) -> Any:
    return _sized(weight, [size] * (len(weight) // size) + ([rest] if (rest := len(weight) % size) else []), dim)


def _sized(weight: Weight8, sizes: Sequence[int], dim: int = 0) -> Any:
    if dim not in (0, -2):
        return NotImplemented
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [weight.part(slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def _empty_like(weight: Weight8, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, weight.dtype):
        return torch.empty(weight.shape, dtype=dtype, device=device or weight.device)
    return Weight8.empty(weight.shape, weight.dtype, device or weight.device)


def _new(func: Any) -> Callable[..., Tensor]:
    return lambda weight, *args, **options: func(weight.scales.new_empty(0, dtype=weight.dtype), *args, **options)


def _copied(weight: Tensor, numbers: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(weight, Weight8):
        return weight.copy_(_plain(numbers))
    if isinstance(numbers, Weight8) and numbers.dtype == weight.dtype and numbers.shape == weight.shape:
        weight.e4m3.copy_(numbers.e4m3)
        weight.scales.copy_(numbers.scales)
        weight.came_from(None, False)  # a caller who knows more says so
    else:
        _write(weight, _plain(numbers))
    return weight


HERE: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), _same),
    aten.clone.default: _clone,
    aten._to_copy.default: _to,
    aten.slice.Tensor: _rows,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _sized,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copied,
    **{func: _new(func) for func in (aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default)},
    aten.new_full.default: _new(aten.new_full.default),
}
