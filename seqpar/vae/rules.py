"""Rules for functions of torch on a strip, and the mode in which diffusers' modules run on a strip.

Modules and weights stay diffusers' own, so no copy of a model can differ. A rule is called in place of a function, with
the strip, the function and its arguments. A function that is neither in `RULES` nor in `known.LOCAL` is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from seqpar.kernels import images
from seqpar.local import sdpa, wide
from seqpar.vae import norms
from seqpar.vae.known import LOCAL
from seqpar.vae.strips import Strip, memory_format

Pads = dict[int, tuple[int, int]]
"""Dim (counted from the end) -> how much is added before and after."""


def pad_strip(strip: Strip, x: Tensor, pads: Pads, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad a strip along some dims; the edge rows along the cut dim are the neighbours'."""
    if mode not in ("constant", "replicate", "reflect"):
        strip.refuse(f"got padding of mode {mode!r}, expected constant, replicate or reflect")
    shape, cut = list(x.shape), strip.cut
    for dim, (before, after) in pads.items():
        shape[dim] += before + after
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    lines = padded
    for dim, (before, _) in pads.items():
        if dim != cut.dim:
            lines = lines.narrow(dim, before, x.shape[dim])
    before, after = pads.get(cut.dim, (0, 0))
    size = x.shape[cut.dim]
    lines.narrow(cut.dim, before, size).copy_(x)
    if before or after:
        if min(cut.shares(size)) < max(before, after):
            strip.refuse(f"got strips of {min(cut.shares(size))} rows, expected at least {max(before, after)}")
        strip.exchanges.swap(
            first=edge(strip, lines, before, after) if not cut.first else None,
            last=edge(strip, lines, size, before) if not cut.last else None,
            before=edge(strip, lines, 0, before) if not cut.first else None,
            after=edge(strip, lines, before + size, after) if not cut.last else None,
        )
        fill_edges(lines, cut.dim, (before, after), mode, value, (cut.first, cut.last))
        strip.has_halo(padded)
    for dim, sides in pads.items():
        if dim != cut.dim:
            fill_edges(padded, dim, sides, mode, value)
    return padded


def edge(strip: Strip, x: Tensor, start: int, count: int) -> Tensor | None:
    """Return some rows of x, with their dims in the order in which they are sent; None for no rows."""
    if not count:
        return None
    rows = x.narrow(strip.cut.dim, start, count)
    return rows.movedim(1, -1) if strip.channels_last else rows


def fill_edges(
    padded: Tensor, dim: int, sides: tuple[int, int], mode: str, value: float, which: tuple[bool, bool] = (True, True)
) -> None:
    """Write the padding of a mode before and after the inside of `padded` along a dim. which: before, and after."""
    before, after = sides[0] * which[0], sides[1] * which[1]
    end = padded.shape[dim] - sides[1]
    if mode == "constant":
        padded.narrow(dim, 0, before).fill_(value)
        padded.narrow(dim, end, after).fill_(value)
        return
    for step in range(before):
        source = sides[0] + (step + 1 if mode == "reflect" else 0)
        padded.narrow(dim, sides[0] - 1 - step, 1).copy_(padded.narrow(dim, source, 1))
    for step in range(after):
        source = end - 1 - (step + 1 if mode == "reflect" else 0)
        padded.narrow(dim, end + step, 1).copy_(padded.narrow(dim, source, 1))


LEAST = 8  # rows of a strip for each row of padding: with fewer, slabs are as large as the strip


def convolve_strip(strip: Strip, x: Tensor, pad: int, apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Convolve a strip with `pad` rows of its neighbours on both sides, or zeros at the outer edges.

    The neighbours' rows arrive while the strip is convolved as if zeros surrounded it; then the convolution of two
    slabs replaces the outermost rows. apply(x, pad): the convolution with `pad` rows of zeros on both sides.
    """
    cut, n, rows, dim = strip.cut, len(x), x.shape[strip.cut.dim], strip.cut.dim
    # the rows before the strip and its first rows, then its last rows and the rows after it, along the batch
    shape = [2 * n, *x.shape[1:]]
    shape[dim] = 3 * pad
    slabs = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    slabs[:n].narrow(dim, pad, 2 * pad).copy_(x.narrow(dim, 0, 2 * pad))
    slabs[n:].narrow(dim, 0, 2 * pad).copy_(x.narrow(dim, rows - 2 * pad, 2 * pad))
    blocks = {
        "first": None if cut.first else edge(strip, x, 0, pad),
        "last": None if cut.last else edge(strip, x, rows - pad, pad),
        "before": None if cut.first else edge(strip, slabs[:n], 0, pad),
        "after": None if cut.last else edge(strip, slabs[n:], 2 * pad, pad),
    }
    with _swapping(strip, blocks):
        out = apply(x, pad)
    edges = apply(slabs[n * cut.first : n * (2 - cut.last)], 0)
    if not cut.first:
        out.narrow(dim, 0, pad).copy_(edges[:n])
    if not cut.last:
        out.narrow(dim, rows - pad, pad).copy_(edges[-n:])
    return out


@contextmanager
def _swapping(strip: Strip, blocks: dict[str, Tensor | None]) -> Iterator[None]:
    """Swap edges, next to the current stream if the strip has a stream for it; at the end they have arrived.

    The current stream waits for them after an error, too: otherwise the memory of strip and slabs would be reused while
    the side stream still reads it.
    """
    side = strip.side
    if side is None:
        strip.exchanges.swap(**blocks)
        yield
        return
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            strip.exchanges.swap(**blocks)
        yield
    finally:
        current.wait_stream(side)


def attention(
    strip: Strip,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Rule of `scaled_dot_product_attention`: queries (B, H, l, D) of a strip, keys and values of all ranks."""
    if strip.cut.axis.size > 1:
        if dropout_p or is_causal or query.ndim != 4:
            strip.refuse(f"got attention of {tuple(query.shape)} with dropout {dropout_p} or is_causal={is_causal}")
        sizes = strip.cut.shares(key.shape[2])
        attn_mask = None if attn_mask is None else _all_columns(strip, attn_mask, sizes)
        key, value = _gathered(strip, key, value, sizes)
    plain = attn_mask is None and not dropout_p and not is_causal and not any(more.values())
    if plain and query.ndim == 4 and _wide(query):
        out_BlHD, _ = wide.attend(*(x.transpose(1, 2) for x in (query, key, value)))
        return out_BlHD.transpose(1, 2)
    return function(query, key, value, attn_mask, dropout_p, is_causal, **more)


def _wide(query: Tensor) -> bool:
    if query.device.type != "cuda" or wide.why_not(query.device, query.dtype, query.shape[-1]) is not None:
        return False
    major = torch.cuda.get_device_capability(query.device)[0]
    return wide.preference(major, query.shape[-1]) > sdpa.preference(major, query.shape[-1])


def _gathered(strip: Strip, k_BHlD: Tensor, v_BHlD: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    (b, heads, _, d), e = k_BHlD.shape, v_BHlD.shape[3]
    gather = strip.exchanges.tokens(sizes, (b, heads, d + e), k_BHlD)
    local_lBHd = gather.outbox()
    local_lBHd[..., :d].copy_(k_BHlD.permute(2, 0, 1, 3))
    local_lBHd[..., d:].copy_(v_BHlD.permute(2, 0, 1, 3))
    k_BHLD, v_BHLD = gather.deliver().permute(1, 2, 0, 3).split((d, e), dim=3)
    return k_BHLD, v_BHLD


def _all_columns(strip: Strip, mask_BHll: Tensor, sizes: tuple[int, ...]) -> Tensor:
    # a key's column depends only on its frame
    pixels = strip.cut.local * strip.cut.other
    local = mask_BHll.shape[-1]
    if local % pixels:
        strip.refuse(f"got a mask of {local} keys, expected frames of {pixels} pixels")
    frames = local // pixels
    column_BHlT1 = mask_BHll.unflatten(-1, (frames, pixels))[..., :1]
    shapes = ((*column_BHlT1.shape[:-1], size // frames) for size in sizes)
    return torch.cat([column_BHlT1.expand(shape).flatten(-2) for shape in shapes], dim=-1)


Rule = Callable[..., Any]
"""Takes a `Strip`, the function, and the function's own arguments; returns the function's result on the strip."""


@dataclass(frozen=True)
class ConvolutionSettings:
    """The arguments of conv2d and conv3d besides their input, under torch's names."""

    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def along(self, value: Any) -> list[int]:
        count = self.weight.ndim - 2
        return [value] * count if isinstance(value, int) else list(value) * (count // len(value))


def convolve(strip: Strip, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dim, settings = strip.cut.dim, ConvolutionSettings(*args, **kwargs)
    weight, apart = settings.weight, norms.adds_apart(input, settings.bias)
    if isinstance(settings.padding, str) or input.ndim != weight.ndim:
        shape = tuple(input.shape)
        strip.refuse(f"got a convolution of {shape} with padding {settings.padding!r}, expected numbers and a batch")
    pad, stride = settings.along(settings.padding)[dim], settings.along(settings.stride)[dim]
    reach = (weight.shape[dim] - 1) * settings.along(settings.dilation)[dim]  # rows of the kernel less one

    def apply(x: Tensor, pad: int) -> Tensor:
        padding, bias = settings.along(settings.padding), None if apart else settings.bias
        padding[dim] = pad
        return function(x, weight, bias, settings.stride, padding, settings.dilation, settings.groups)

    if pad > 0 or reach == 0:
        strip.check(input)
    elif not strip.is_padded(input):
        strip.refuse(f"got a convolution over {reach + 1} rows without padding, of a tensor that was not padded")
    if pad == 0 or strip.cut.axis.size == 1:
        out = apply(input, pad)
    elif stride == 1 and reach == 2 * pad and input.shape[dim] >= LEAST * pad:
        # each rank may decide by its own rows: its neighbours send and receive the same rows either way
        out = convolve_strip(strip, input, pad, apply)
    else:
        out = apply(pad_strip(strip, input, {dim: (pad, pad)}), 0)
    strip.check(out)
    return norms.with_bias(out, settings.bias) if apart else out


def pad(
    strip: Strip, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    pads = {-1 - index: (pad[2 * index], pad[2 * index + 1]) for index in range(len(pad) // 2)}
    if pads.get(strip.cut.dim, (0, 0)) == (0, 0):
        return function(input, pad, mode, value)
    if min(pad) < 0:
        strip.refuse(f"got padding {tuple(pad)}, expected no negative numbers")
    strip.check(input)
    return pad_strip(strip, input, pads, mode, value or 0.0)


def interpolate(
    strip: Strip,
    function: Any,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor]
    if size is not None or mode not in ("nearest", "nearest-exact") or any(f != int(f) for f in factors):
        strip.refuse(f"got interpolation {mode!r} to {size or scale_factor}, expected the nearest by integer factors")
    strip.check(input)
    if input.ndim == 4 and {*factors} == {2}:
        return images.double(input)
    return function(input, size, scale_factor, mode, *args, **kwargs)


def dropout(
    strip: Strip, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if training and p:
        strip.refuse("got an active dropout, which would draw other numbers for a strip; call eval()")
    return input


RULES: Mapping[Callable[..., Any], Rule] = {
    F.conv2d: convolve,
    F.conv3d: convolve,
    F.pad: pad,
    F.group_norm: norms.group_norm,
    F.layer_norm: norms.layer_norm,
    F.normalize: norms.normalize,
    torch.Tensor.mean: norms.mean,
    norms.normed: norms.apply_normed,
    norms.sum_of: norms.apply_sum,
    F.scaled_dot_product_attention: attention,
    F.interpolate: interpolate,
    F.dropout: dropout,
}


class StripMode(TorchFunctionMode):
    """While it is entered, torch functions of this thread compute on this rank's strip, without gradients.

    Raises ValueError for a function without a rule that is not known to be local: a wrong image is worse.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None:
            return rule(self._strip, func, *args, **(kwargs or {}))
        if func not in LOCAL:
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            self._strip.refuse(f"got the function {name}, which has no rule for strips")
        return func(*args, **(kwargs or {}))
