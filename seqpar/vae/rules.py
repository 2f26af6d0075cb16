"""What each function does to a strip: rules by function, and the mode in which diffusers' modules run on a strip.

The modules and their weights stay diffusers' own, so there is no copy of a model that could differ. A rule is called in
place of the function, with the strip, the function and its arguments. Functions that are in neither `RULES` nor
`known.LOCAL` are refused.
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

from seqpar.kernels import upsample
from seqpar.local import sdpa, wide
from seqpar.vae import norms
from seqpar.vae.known import LOCAL
from seqpar.vae.strips import Strip, memory_format

Pads = dict[int, tuple[int, int]]
"""Dim (counted from the end) -> how much is added before and after."""


def pad_strip(strip: Strip, x: Tensor, pads: Pads, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Return a strip x padded along some dims. A mode other than constant, replicate and reflect is refused."""
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
    lines.narrow(cut.dim, before, x.shape[cut.dim]).copy_(x)
    fill_halo(strip, lines, (before, after), mode, value)
    for dim, sides in pads.items():
        if dim != cut.dim:
            fill_edges(padded, dim, sides, mode, value)
    if before or after:
        strip.has_halo(padded)
    return padded


def fill_halo(strip: Strip, padded: Tensor, sides: tuple[int, int], mode: str = "constant", value: float = 0.0) -> None:
    """Write the edge rows of a padded strip whose inside is written: the neighbours' rows, or the outer padding."""
    cut, (before, after) = strip.cut, sides
    if not (before or after):
        return
    size = padded.shape[cut.dim] - before - after
    if min(cut.shares(size)) < max(before, after):
        strip.refuse(f"got strips of {min(cut.shares(size))} rows, expected at least {max(before, after)}")
    strip.exchanges.swap(
        first=edge(strip, padded, before, after) if not cut.first else None,
        last=edge(strip, padded, size, before) if not cut.last else None,
        before=edge(strip, padded, 0, before) if not cut.first else None,
        after=edge(strip, padded, before + size, after) if not cut.last else None,
    )
    fill_edges(padded, cut.dim, sides, mode, value, (cut.first, cut.last))


def edge(strip: Strip, x: Tensor, start: int, count: int) -> Tensor | None:
    """Return some rows of x, with their dims in the order in which they travel; None for no rows."""
    if not count:
        return None
    rows = x.narrow(strip.cut.dim, start, count)
    return rows.movedim(1, -1) if strip.channels_last else rows


def fill_edges(
    padded: Tensor, dim: int, sides: tuple[int, int], mode: str, value: float, which: tuple[bool, bool] = (True, True)
) -> None:
    """Write what a mode of padding puts before and after the inside of `padded` along a dim.

    which: whether to write before, and after.
    """
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


def fits(strip: Strip, x: Tensor, pad: int, reach: int, stride: int) -> bool:
    """Return whether a convolution keeps the rows of the strip, and whether most of them need no neighbour.

    reach: rows of the kernel less one. Each rank may decide for itself: its neighbours send and get the same rows.
    """
    return stride == 1 and reach == 2 * pad and x.shape[strip.cut.dim] >= LEAST * pad


def convolve_strip(strip: Strip, x: Tensor, pad: int, apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the convolution of a strip x with `pad` rows of its neighbours on both sides, or zeros at the outer edges.

    apply: the convolution of a tensor with so many rows of zeros on both sides.
    """
    cut, n, rows = strip.cut, len(x), x.shape[strip.cut.dim]
    slabs = _slabs(strip, x, pad)
    blocks = {
        "first": None if cut.first else edge(strip, x, 0, pad),
        "last": None if cut.last else edge(strip, x, rows - pad, pad),
        "before": None if cut.first else edge(strip, slabs[:n], 0, pad),
        "after": None if cut.last else edge(strip, slabs[n:], 2 * pad, pad),
    }
    with _travelling(strip, blocks):
        out = apply(x, pad)
    edges = apply(slabs[n * cut.first : n * (2 - cut.last)], 0)
    if not cut.first:
        out.narrow(cut.dim, 0, pad).copy_(edges[:n])
    if not cut.last:
        out.narrow(cut.dim, rows - pad, pad).copy_(edges[-n:])
    return out


def _slabs(strip: Strip, x: Tensor, pad: int) -> Tensor:
    """Return room for the rows before the strip and its first rows, and for its last rows and those after it.

    Both lie one after the other in the dim of the batch. The strip's own rows are written.
    """
    dim, n, rows = strip.cut.dim, len(x), x.shape[strip.cut.dim]
    shape = [2 * n, *x.shape[1:]]
    shape[dim] = 3 * pad
    slabs = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    slabs[:n].narrow(dim, pad, 2 * pad).copy_(x.narrow(dim, 0, 2 * pad))
    slabs[n:].narrow(dim, 0, 2 * pad).copy_(x.narrow(dim, rows - 2 * pad, 2 * pad))
    return slabs


@contextmanager
def _travelling(strip: Strip, blocks: dict[str, Tensor | None]) -> Iterator[None]:
    """While it is entered edges are swapped, beside the current stream if the strip has a stream for it.

    At its end they have arrived. The current stream waits for them after an error, too: else the memory of strip and
    slabs would be given to others while the side stream still uses it.
    """
    side = strip.side
    if side is None:
        strip.exchanges.swap(**blocks)
        yield
        return
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            strip.exchanges.swap(**blocks)
        yield
    finally:
        here.wait_stream(side)


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
    """Apply the rule of `torch.nn.functional.scaled_dot_product_attention` to the tokens of a strip (B, H, l, D)."""
    if strip.cut.axis.size > 1:
        if dropout_p or is_causal or query.ndim != 4:
            strip.refuse(f"got attention of {tuple(query.shape)} with dropout {dropout_p} or is_causal={is_causal}")
        sizes = strip.cut.shares(key.shape[2])
        attn_mask = None if attn_mask is None else _all_columns(strip, attn_mask, sizes)
        key, value = _gathered(strip, key, value, sizes)
    plain = attn_mask is None and not dropout_p and not is_causal and all(not each for each in more.values())
    if plain and query.ndim == 4 and _wide(query):
        out_BlHD, _ = wide.attend(*(x.transpose(1, 2) for x in (query, key, value)))
        return out_BlHD.transpose(1, 2)
    return function(query, key, value, attn_mask, dropout_p, is_causal, **more)


def _wide(query: Tensor) -> bool:
    """Return whether the kernel for wide heads works and is the first choice."""
    if query.device.type != "cuda" or wide.why_not(query.device, query.dtype, query.shape[-1]) is not None:
        return False
    major = torch.cuda.get_device_capability(query.device)[0]
    return wide.preference(major, query.shape[-1]) > sdpa.preference(major, query.shape[-1])


def _gathered(strip: Strip, k_BHlD: Tensor, v_BHlD: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks."""
    (b, heads, _, d), e = k_BHlD.shape, v_BHlD.shape[3]
    gather = strip.exchanges.tokens(sizes, (b, heads, d + e), k_BHlD)
    mine_lBHd = gather.outbox()
    mine_lBHd[..., :d].copy_(k_BHlD.permute(2, 0, 1, 3))
    mine_lBHd[..., d:].copy_(v_BHlD.permute(2, 0, 1, 3))
    k_BHLD, v_BHLD = gather.deliver().permute(1, 2, 0, 3).split((d, e), dim=3)
    return k_BHLD, v_BHLD


def _all_columns(strip: Strip, mask_BHll: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return a mask's columns for the keys of all ranks; a key's column depends only on its frame."""
    pixels = strip.cut.mine * strip.cut.other
    local = mask_BHll.shape[-1]
    if local % pixels:
        strip.refuse(f"got a mask of {local} keys, expected frames of {pixels} pixels")
    frames = local // pixels
    column_BHlT1 = mask_BHll.unflatten(-1, (frames, pixels))[..., :1]
    shapes = ((*column_BHlT1.shape[:-1], size // frames) for size in sizes)
    return torch.cat([column_BHlT1.expand(shape).flatten(-2) for shape in shapes], dim=-1)


Rule = Callable[..., Any]
"""Takes a `Strip`, the function, and the function's own arguments; returns what the function does on the strip."""


@dataclass(frozen=True)
class ConvolutionSettings:
    """What conv2d and conv3d take besides their input, under torch's names."""

    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def along(self, value: Any) -> tuple[int, ...]:
        """Return a value for each dim of the kernel."""
        count = self.weight.ndim - 2
        return (value,) * count if isinstance(value, int) else tuple(value) * (count // len(value))

    def padded(self, dim: int, pad: int) -> tuple[int, ...]:
        """Return the padding, with another one along a dim that is counted from the end."""
        pads = [*self.along(self.padding)]
        pads[dim] = pad
        return tuple(pads)


def convolve(strip: Strip, function: Any, input: Tensor, *settings: Any, **named: Any) -> Tensor:
    """Apply the rule of conv2d and conv3d: padding along the cut dim becomes rows of the neighbours."""
    at, own = strip.cut.dim, ConvolutionSettings(*settings, **named)
    weight, apart = own.weight, norms.adds_apart(input, own.bias)
    if isinstance(own.padding, str) or input.ndim != weight.ndim:
        shape = tuple(input.shape)
        strip.refuse(f"got a convolution of {shape} with padding {own.padding!r}, expected numbers and a batch")
    pad, reach = own.along(own.padding)[at], (weight.shape[at] - 1) * own.along(own.dilation)[at]

    def apply(x: Tensor, pad: int) -> Tensor:
        bias = None if apart else own.bias
        return function(x, weight, bias, own.stride, own.padded(at, pad), own.dilation, own.groups)

    if pad > 0 or reach == 0:
        strip.check(input)
    elif not strip.is_padded(input):
        strip.refuse(f"got a convolution over {reach + 1} rows without padding, of a tensor that was not padded")
    out = _with_halo(strip, input, (pad, reach, own.along(own.stride)[at]), apply) if pad else apply(input, 0)
    strip.check(out)
    return norms.with_bias(out, own.bias) if apart else out


def _with_halo(strip: Strip, x: Tensor, sizes: tuple[int, int, int], apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the convolution of a strip x with rows of its neighbours; sizes: padding, rows of the kernel - 1, stride.

    apply: the convolution of a tensor with so many rows of zeros on both sides.
    """
    pad = sizes[0]
    if strip.cut.axis.size == 1:
        return apply(x, pad)
    if fits(strip, x, *sizes):
        return convolve_strip(strip, x, pad, apply)
    return apply(pad_strip(strip, x, {strip.cut.dim: (pad, pad)}), 0)


def pad(
    strip: Strip, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Apply the rule of `torch.nn.functional.pad`: only padding along the cut dim needs the neighbours."""
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
    *more: Any,
    **named: Any,
) -> Tensor:
    """Apply the rule of `torch.nn.functional.interpolate`: a nearest one by whole factors is local."""
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor]
    if size is not None or mode not in ("nearest", "nearest-exact") or any(f != int(f) for f in factors):
        strip.refuse(f"got interpolation {mode!r} to {size or scale_factor}, expected the nearest by whole factors")
    strip.check(input)
    if input.ndim == 4 and {*factors} == {2}:
        return upsample.double(input)
    return function(input, size, scale_factor, mode, *more, **named)


def dropout(
    strip: Strip, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the input of `torch.nn.functional.dropout`; a dropout that is active is refused."""
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
    """While it is entered, torch functions of this thread act on this rank's strip. It computes no gradients.

    Raises ValueError for a function that has no rule and is not known to act on each pixel alone.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's rule, or the function itself where it is local."""
        rule = RULES.get(func)
        if rule is not None:
            return rule(self._strip, func, *args, **(kwargs or {}))
        if func not in LOCAL:
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            self._strip.refuse(f"got the function {name}, which has no rule for strips")
        return func(*args, **(kwargs or {}))
