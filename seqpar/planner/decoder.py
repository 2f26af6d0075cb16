"""Predicts the time and peak memory of any decoder or encoder, without a GPU and without its weights.

`count` watches a call of the module, best on the meta device, which computes shapes only: a `TorchDispatchMode` sees
every operation, counts the FLOPs of convolutions, matrix products and attention and the bytes of everything else, and
follows each storage from its allocation to its end. `milliseconds` divides these counts by the machine's rates.
Facts about GPUs that no shape tells: cuDNN convolves channels-last, so that a channels-first convolution holds
transposed copies of its input and output while it runs (decoding 512 to 4096 pixels a side with AutoencoderKL needs
exactly these bytes); attention holds no scores; a group norm reads its input twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from seqpar.planner.predict import GIB
from seqpar.planner.rates import Rates, rate_at, time_at

Kind = Literal["convolution", "convolution_3d", "product", "attention", "pass", "exchange"]
aten = torch.ops.aten


@dataclass(frozen=True)
class Operation:
    """One operation: its kind, FLOPs and bytes read and written besides; size: what the rate of its kind depends on.

    size: the elements of a product's output, the FLOPs of a convolution, the head dim of attention.
    """

    kind: Kind
    flops: float
    moved: float
    size: float = 0


@dataclass(frozen=True)
class Counted:
    """All operations of a call, and the most bytes that what it made held at once: without weights and inputs.

    largest: the bytes of its largest tensor.
    """

    operations: tuple[Operation, ...]
    peak: int
    largest: int = 0

    def extended(self, more: Counted, times: int) -> Counted | None:
        """Return what `times` further repetitions take after `more`, which repeats this once more at its end.

        None where the operations at the end of `more` are not those at the end of this, so that nothing repeats.
        """
        period = len(more.operations) - len(self.operations)
        tails = [[(x.kind, x.flops) for x in each.operations[-period:]] for each in (self, more)]
        if period <= 0 or tails[0] != tails[1]:
            return None
        operations = more.operations + more.operations[-period:] * times
        return replace(more, operations=operations, peak=more.peak + times * max(0, more.peak - self.peak))

    @property
    def gib(self) -> float:
        """Return the peak in GiB."""
        return self.peak / GIB


def count(run: Callable[[], object], copies: bool = True) -> Counted:
    """Return the operations of `run()` and the peak of the bytes that it allocates, on any device, also on meta.

    Nothing that lived before the call is counted. What `run` returns is. copies: whether convolutions of contiguous
    tensors hold transposed copies. The meta device does not tell: its convolutions return contiguous tensors always.
    """
    counter = Counter(copies)
    with torch.inference_mode(), counter:
        kept = run()
    del kept
    return Counted(tuple(counter.operations), counter.peak, counter.largest)


def milliseconds(counted: Counted, rates: Rates, transport: str = "") -> float:
    """Return the predicted ms of a counted call. transport: the key of its exchanges' times in `rates.exchange`."""
    return 1e-3 * sum(_us(operation, rates, transport) for operation in counted.operations)


def _us(operation: Operation, rates: Rates, transport: str) -> float:
    """Return the us of one operation: its arithmetic, then the bytes that it moves besides, at least a launch."""
    if operation.kind == "exchange":
        return time_at(rates.exchange[transport], operation.moved)
    moved = 1e-6 * operation.moved / rates.copy
    if operation.kind == "pass":
        return max(moved, rates.kernel_us)
    if operation.kind == "attention":
        nearest = min(rates.attention, key=lambda dim: max(dim, operation.size) / min(dim, operation.size))
        rate = rate_at(rates.attention[nearest], operation.flops)
    elif operation.kind == "product":
        rate = rate_at(rates.gemm, operation.size)
    else:
        share = rates.convolution_3d if operation.kind == "convolution_3d" else 1.0
        rate = share * rate_at(rates.convolution, operation.size)
    return max(1e-6 * operation.flops / rate, rates.kernel_us) + moved


# Counting ------------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts operations and live bytes while it is active. peak: the most bytes that were live at once."""

    def __init__(self, copies: bool = True) -> None:
        super().__init__()
        self._copied = copies
        self.operations: list[Operation] = []
        self.live = self.peak = self.largest = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation and count it."""
        self._look()  # what was freed and allocated since, also by resizing a storage
        out = func(*args, **(kwargs or {}))
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
        copies = 0
        if _is_convolution(func):
            copies = _copies(args, outputs) if self._copied else 0
            copies += _huge(args, outputs)
        operation = _operation(func, args, inputs, outputs, copies)
        if operation is not None:
            self.operations.append(operation)
        for tensor in outputs:
            self._hold(tensor)
        if func.overloadpacket not in FREE:
            self._look(copies)
        return out

    def _look(self, more: int = 0) -> None:
        """Compare the live bytes (and `more`, which an operation holds while it runs) with the peak."""
        sizes = [storage.nbytes() for ref in [*self._alive.values()] if (storage := ref()) is not None]
        self.live = sum(sizes)
        self.peak = max(self.peak, self.live + more)
        self.largest = max([self.largest, *sizes])

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, alive = storage._cdata, self._alive
        if key not in alive:
            alive[key] = weakref.ref(storage, lambda _: alive.pop(key, None))


def follow(sent: int) -> None:
    """Tell the counter that is active, if there is one, of an exchange in which the busiest rank sends these bytes."""
    counter = next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Counter)), None)
    if counter is not None:
        counter.operations.append(Operation("exchange", 0, sent))


def _operation(
    func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor], copies: int
) -> Operation | None:
    """Return the cost of an operation; None for views and for operations that compute nothing."""
    if not outputs:
        return None
    name, out = func.overloadpacket, outputs[0]
    if _is_convolution(func):
        weight = args[1]
        # a transposed convolution spreads each input value, the other ones gather each output value
        values = args[0] if _is_transposed(func, args) else out
        flops = 2.0 * values.numel() * weight[0].numel()
        kind: Kind = "convolution_3d" if weight.dim() == 5 else "convolution"
        return Operation(kind, flops, 2.0 * copies, flops)
    if name in PRODUCTS:
        return Operation("product", 2.0 * out.numel() * PRODUCTS[name](args), 0, out.numel())
    if name in ATTENTION:
        q, k, v = args[:3]
        flops = 2.0 * q.numel() * k.shape[-2] + 2.0 * q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1]
        return Operation("attention", flops, 0, q.shape[-1])
    return _pass(func, inputs, outputs)


def _pass(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Operation | None:
    """Return the cost of an operation that is bound by the bytes that it reads and writes."""
    storages = {x.untyped_storage()._cdata for x in inputs}
    made = [x for x in outputs if x.untyped_storage()._cdata not in storages]
    if func.overloadpacket in FREE or (not made and not func._schema.is_mutable):
        return None
    moved = sum(map(_bytes, inputs)) + sum(map(_bytes, made))
    if func.overloadpacket in NORMS:
        moved += _bytes(inputs[0])
    return Operation("pass", 0, moved)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's values; a value that is repeated by stride 0 counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size() if x.numel() else 0


def _copies(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Return the bytes of the transposed copies of a convolution's input and output, 0 if it is channels-last."""
    x, layout = args[0], {4: torch.channels_last, 5: torch.channels_last_3d}.get(args[0].dim())
    if layout is not None and x.is_contiguous(memory_format=layout):
        return 0
    return _bytes(x) + _bytes(outputs[0])


def _huge(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Return the bytes of one more copy of a convolution's larger tensor if that has more than 2^32 elements, else 0.

    Seen on H200s: a decoding of 8192 x 8192 on two needs 16 GiB more, as much as one tensor of 2^33 elements has, and
    one of 4096 x 4096, whose largest tensor has 2^32, needs nothing more.
    """
    largest = max((args[0], outputs[0]), key=Tensor.numel)
    return _bytes(largest) if largest.numel() > 2**32 else 0


def _is_convolution(func: Any) -> bool:
    return func.overloadpacket in CONVOLUTIONS


def _is_transposed(func: Any, args: tuple[Any, ...]) -> bool:
    return func.overloadpacket in TRANSPOSED or (func.overloadpacket is aten.convolution and bool(args[6]))


TRANSPOSED = frozenset((aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d))
CONVOLUTIONS = TRANSPOSED | {aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution}
NORMS = frozenset((aten.group_norm, aten.native_group_norm, aten.layer_norm, aten.native_layer_norm))
# allocations write nothing yet
FREE = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach))
ATTENTION = frozenset(
    (
        aten.scaled_dot_product_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_flash_attention,
    )
)
# name -> the length of the sums of a product, from its arguments
PRODUCTS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.linear: lambda args: args[1].shape[-1],
    aten.mm: lambda args: args[1].shape[-2],
    aten.bmm: lambda args: args[1].shape[-2],
    aten.matmul: lambda args: args[0].shape[-1],
    aten.addmm: lambda args: args[2].shape[-2],
    aten.baddbmm: lambda args: args[2].shape[-2],
}
