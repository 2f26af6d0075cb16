"""What attention in 8 bits needs to know of a transformer: means of keys and values, and the largest numbers.

They come from the calibration's run (`seqpar.transformer.calibration`), by attention module, and no call changes them.
A softmax ignores what is taken out of all keys, and gives back what is taken out of all values, so that any fixed
centre is right. Scales are powers of two, which change no digit. Numbers that a call has beyond twice the largest one
of the calibration's run become 448 in e4m3; they are not counted, because a count would make the host wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import floor, log2
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn

from seqpar.families._cuts import is_attention
from seqpar.kernels.prepare8 import rotated
from seqpar.kernels.rows8 import LARGEST
from seqpar.transformer.attention import Override, arguments_of, fitting
from seqpar.types.protocols import Qkv8, state_dtype

HEADROOM = 2.0
UNTIED = 117 / 128
"""A factor of the values' scale. With a power of two one in 16 bf16 values lies halfway between two of e4m3. A centre,
however small, moves all of them to the same side: the rounding error has a mean of 0.1 % of the values' size, which
outgrows its random part beyond about 600 keys of equal weight."""
MEANS, MOST = "|attention means", "|attention most"  # after an attention's path in the cache
KEEPS = "seqpar_keeps_attention"  # an argument besides the transformer's own: whether attention keeps the dtype


class Watched:
    """Statistics of one attention in a run: sums, the smallest and the largest number of each channel of k and v."""

    def __init__(self) -> None:
        self._rows = 0
        self._sums, self._low, self._high, self._q_most = (torch.zeros(()) for _ in range(4))

    def look(self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> None:
        """Take q, k and v as attention gets them; groups that are not those of the first call are left out."""
        wide, (_, _, groups, dim) = state_dtype(k_BLGD.dtype), k_BLGD.shape
        q, k = (rotated(x.to(wide)) for x in (q_BLHD, k_BLGD))
        both_2RGD = torch.stack([k, v_BLGD.to(wide)]).flatten(1, 2)
        if not self._rows:
            self._sums = both_2RGD.new_zeros(2, groups, dim, dtype=torch.float64)
            self._low, self._high = self._sums + torch.inf, self._sums - torch.inf
            self._q_most = self._sums[0, :, 0].clone()
        if self._sums.shape[1:] != (groups, dim):
            return
        self._rows += both_2RGD.shape[1]
        self._sums += both_2RGD.sum(1, dtype=wide)
        self._low = torch.minimum(self._low, both_2RGD.amin(1))
        self._high = torch.maximum(self._high, both_2RGD.amax(1))
        self._q_most = torch.maximum(self._q_most, q.abs().amax((0, 1, 3)).unflatten(0, (groups, -1)).amax(-1))

    def numbers(self) -> dict[str, Tensor]:
        """Return the means of k, rotated, and v, (2, G, D), and the largest q, k and v less these means, (3, G)."""
        if not self._rows:
            return {}
        means = (self._sums / self._rows).float()
        most = torch.maximum(self._high - means, means - self._low).amax(-1)
        return {MEANS: means.cpu(), MOST: torch.cat([self._q_most[None], most]).float().cpu()}


@contextmanager
def watched(module: nn.Module, prefix: str) -> Iterator[Mapping[str, Watched]]:
    """Watch self-attention of a transformer's attention modules in this context, by their paths behind a prefix."""
    seen, running, handles = dict[str, Watched](), list[str](), []

    def look(*args: Any, **kwargs: Any) -> Tensor:
        if running:  # otherwise it is that of a text encoder
            q, k, v, _, scale = arguments_of(*args, **kwargs)
            if q.shape[1] == k.shape[1]:
                seen.setdefault(running[-1], Watched()).look(*fitting(q, k, v, scale))
        return F.scaled_dot_product_attention(*args, **kwargs)

    def end(*_: object) -> None:
        running.pop()

    for path, part in module.named_modules():
        if is_attention(part):
            begin = partial(lambda name, *_: running.append(name), prefix + path)
            handles += [part.register_forward_pre_hook(begin), part.register_forward_hook(end, always_call=True)]
    try:
        with Override({F.scaled_dot_product_attention: look}), attention_backend():
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def rounding_of(means_2GD: Tensor, most_3G: Tensor, dtype: torch.dtype, device: torch.device) -> Qkv8 | None:
    """Return how an attention's q, k and v become e4m3; None if q and k are too large for it.

    The scale of k is balanced with that of q, whose inverse it is: both then have the same largest number. That of v is
    the same for all heads: e4m3 keeps its digits over 15 powers of two. It is no power of two itself (`UNTIED`).
    """
    q, k, _ = torch.where(most_3G == 0, 1.0, most_3G.double()) * HEADROOM
    if bool((q * k > LARGEST**2).any()) or not bool(most_3G.isfinite().all()):
        return None
    v = HEADROOM * (float(most_3G[2].amax()) or 1.0)
    k_scale, v_scale = 2 ** ((q / k).log2() / 2).round(), UNTIED * 2.0 ** floor(log2(LARGEST / v))
    k_centre, v_centre = (x.to(device) for x in means_2GD)
    return Qkv8(k_scale.float().to(device), k_centre, v_scale, v_centre.to(dtype))


# Steps of a run ------------------------------------------------------------------------------------------------


def steps_of(text: str) -> slice:
    """Return the steps START:STOP, as those of a Python slice; ValueError for another text."""
    match = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text)
    if match is None:
        raise ValueError(
            f"got attention steps {text!r}, expected START:STOP, such as 2:-2, all but the first two and the last two"
        )
    return slice(*(number and int(number) for number in match.groups()))


def check_steps(text: str | None, eight: bool, min_psnr: float | None) -> None:
    """Raise ValueError for steps in which attention is in 8 bits, without such an attention or with a budget."""
    if text is None:
        return
    steps_of(text)
    if not eight:
        raise ValueError(f"attention steps {text} need the local attention fp8")
    if min_psnr is not None:
        raise ValueError(f"attention steps {text} with a least PSNR: it is searched with one attention in all steps")


def check_counts(scheduler: object) -> None:
    """Raise ValueError for what does not say which step it makes next."""
    if not hasattr(scheduler, "step_index"):
        name = type(scheduler).__name__
        raise ValueError(f"attention steps need a pipeline whose scheduler counts its steps (step_index), not {name}")


def keeps_dtype(pipe: Any, text: str) -> bool:
    """Return whether the step that a pipeline's scheduler makes next is none of START:STOP; ValueError if unknown."""
    scheduler = getattr(pipe, "scheduler", pipe)
    check_counts(scheduler)
    first = scheduler.begin_index or 0
    now = first if scheduler.step_index is None else scheduler.step_index  # None before the first step of a run
    return now - first not in range(len(scheduler.timesteps) - first)[steps_of(text)]
