"""A small kernel and the product after it, weights fetched ahead or not, started early or not: what decides
`ahead.BYTES`.

At few rows, where a product is bound by streaming its weights. Each way is timed as a whole, weights and inputs
in turn, so that the cache holds none of them. "alone" is the product without the kernel before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from launch import timing
from launch.products import ALONE, NORM, Product
from seqpar.kernels import adaln, prepare, swiglu
from seqpar.kernels.adaln import Gated
from seqpar.kernels.ahead import Ahead, spread
from seqpar.local import reference, sdpa
from seqpar.protocols import Prepare

MB = (2, 4, 8, 16, 32)  # fetched ahead; the cache of an H200 holds 50
EARLY = (0, 4, 16)  # the same by a kernel that starts early
PICTURE = 256  # tokens that attention sees, however few are on a rank
AS_IT_IS = "as it is"


class Sizes(NamedTuple):
    """A model's: width of the stream and of the feed-forward, attention heads."""

    name: str
    width: int
    hidden: int
    heads: int


SIZES = (Sizes("7B", 4096, 11008, 32), Sizes("DiT-XL/2", 1152, 4608, 16))
Before = Callable[..., Tensor]


class Link(NamedTuple):
    """What comes before a product (inner, columns): the kernel (fetching, *inputs); plain torch (*inputs)."""

    name: str
    inner: int
    columns: int
    inputs: Callable[[int], tuple[Tensor, ...]]
    kernel: Before
    plain: Before


def chains(
    sizes: Sequence[Sizes] = SIZES, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Sequence[Product]:
    """All kernels that a product of the first model follows, and the second model's first; inputs are (2, n/2, ..)."""
    rand = partial(timing.rand, dtype=dtype, device=device)
    first, second = sizes
    links = (normed(first, rand), gated(first, rand), activated(first, rand), attended(first, rand))
    return [*(chain(link, first.name, rand) for link in links), chain(normed(second, rand), second.name, rand)]


def chain(link: Link, model: str, rand: Callable[..., Tensor]) -> Product:
    """A way takes the product's weights first, then the inputs of what comes before it."""

    def data(rows: int) -> tuple[Tensor, ...]:
        return (rand(link.columns, link.inner) / link.inner**0.5, *link.inputs(rows))

    def plain(weight: Tensor, *inputs: Tensor) -> Tensor:
        return F.linear(link.plain(*inputs), weight)

    return Product(f"{link.name}, {model}", link.inner, link.columns, data, ways(link), plain)


def ways(link: Link) -> Mapping[str, Callable[..., Tensor]]:
    """weights, inputs -> the product; no more is fetched ahead than there is."""

    def way(mb: int, early: bool, weight: Tensor, *inputs: Tensor) -> Tensor:
        return F.linear(link.kernel(fetched(weight, mb, early), *inputs), weight)

    sensible = [mb for mb in MB if mb == MB[0] or mb << 19 < 2 * link.inner * link.columns]
    # of any input as wide as the product's
    alone = {ALONE: lambda weight, x, *rest: F.linear(x.flatten(2)[..., : link.inner], weight)}
    later = {f"{mb} MB ahead": partial(way, mb, False) for mb in sensible}
    early = {f"{mb} MB ahead, early": partial(way, mb, True) for mb in EARLY if mb in (0, *sensible)}
    return alone | {AS_IT_IS: partial(way, 0, False)} | later | early


def fetched(weight: Tensor, mb: int, early: bool) -> Ahead | None:
    """So much of a weight; None for nothing. `ValueError` where it cannot be fetched: its time would be another's."""
    if not mb:
        return Ahead(None, 0, early) if early else None
    what = spread(weight, mb << 20)
    if what is None:
        raise ValueError(f"got weights of {tuple(weight.shape)}, expected rows of 16-byte multiples, 128 bytes or more")
    return what._replace(early=early)


def normed(size: Sizes, rand: Callable[..., Tensor]) -> Link:
    """Norm and modulation before qkv."""

    def inputs(rows: int) -> tuple[Tensor, ...]:
        shift, scale = rand(2, 2, size.width, dtype=torch.float32).unbind(1)
        return rand(2, rows // 2, size.width), shift, scale

    return Link(
        "norm, qkv", size.width, 3 * size.width, inputs,
        lambda fetching, x, shift, scale: adaln.launch(x, None, shift, scale, NORM, fetching=fetching)[1],
        lambda x, shift, scale: adaln.reference(x, None, shift, scale, NORM)[1],
    )  # fmt: skip


def gated(size: Sizes, rand: Callable[..., Tensor]) -> Link:
    """Gate, residual and norm before w1|w3."""

    def inputs(rows: int) -> tuple[Tensor, ...]:
        vectors = rand(2, 3, size.width, dtype=torch.float32).unbind(1)
        return rand(2, rows // 2, size.width), rand(2, rows // 2, size.width), *vectors

    return Link(
        "gate + norm, w1|w3", size.width, 2 * size.hidden, inputs,
        lambda fetching, x, h, gate, *how: adaln.launch(x, Gated(gate, h), *how, norm=NORM, fetching=fetching)[1],
        lambda x, h, gate, *how: adaln.reference(x, Gated(gate, h), *how, norm=NORM)[1],
    )  # fmt: skip


def activated(size: Sizes, rand: Callable[..., Tensor]) -> Link:
    """SwiGLU before w2."""
    return Link(
        "SwiGLU, w2", size.hidden, size.width, lambda rows: (rand(2, rows // 2, 2 * size.hidden),),
        lambda fetching, packed: swiglu.launch(packed, fetching=fetching), swiglu.reference,
    )  # fmt: skip


def attended(size: Sizes, rand: Callable[..., Tensor]) -> Link:
    """QK-norm and rotary, then attention of these queries to a picture's keys and values (as gathered), before wo."""
    dim = size.width // size.heads

    def inputs(rows: int) -> tuple[Tensor, ...]:
        mine, whole = ((2, tokens, size.heads, dim) for tokens in (rows // 2, PICTURE))
        angles = rand(2, rows // 2, dim // 2, dtype=torch.float32)
        return rand(*mine), rand(*mine), rand(*whole), rand(*whole), *rand(4, size.width), *angles

    def preparation(affine: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Prepare:
        return Prepare("layer", False, 1e-5, *affine, cos_lD2=cos, sin_lD2=sin)

    def kernel(fetching: Ahead | None, q: Tensor, k: Tensor, keys: Tensor, values: Tensor, *how: Tensor) -> Tensor:
        queries, _ = prepare.launch(q, k, preparation(how[:4], *how[4:]), fetching=fetching)
        return sdpa.attend(queries, keys, values)[0].flatten(2)

    def plain(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, *how: Tensor) -> Tensor:
        queries, _ = prepare.reference(q, k, preparation(how[:4], *how[4:]))
        return reference.attend(queries, keys, values)[0].flatten(2)

    return Link("prepare + attention, wo", size.width, size.width, inputs, kernel, plain)
