"""Tests of single rules: where edge rows come from, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.mesh.mesh import Axis, Mesh
from seqpar.transports import collective
from seqpar.vae import known
from seqpar.vae import rules as edges
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.rules import StripMode
from seqpar.vae.strips import Cut, Exchanges, Strip
from tests.support import vaes
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

WEIGHT = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv 3x3": lambda x, w: F.conv2d(x, w, None, 1, 1),
    "conv 5x3": lambda x, w: F.conv2d(x, w.repeat(1, 1, 2, 1)[:, :, :5], padding=(2, 1)),
    "conv 3x5": lambda x, w: F.conv2d(x, w.repeat(1, 1, 1, 2)[..., :5], padding=(1, 2)),
    "dilated": lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
    "strided": lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    "pad and strided": lambda x, w: F.conv2d(F.pad(x, (0, 1, 0, 1)), w, stride=2),
    "replicate": lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), w),
    "reflect": lambda x, w: F.conv2d(F.pad(x, (2, 1, 1, 2), mode="reflect"), w.repeat(1, 1, 2, 2)[:, :, :4, :4]),
    "constant": lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), value=3.0), w),
    "causal 3-D": lambda x, w: F.conv3d(F.pad(x[:, :, None], (1, 1, 1, 1, 2, 0)), w[:, :, None].repeat(1, 1, 3, 1, 1))[
        :, :, 0
    ],
    "group norm": lambda x, w: F.group_norm(x, 2, w[0, :, 0, 0], w[0, :, 1, 1], 1e-3),
    "upsampled": lambda x, w: F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), w, padding=1),
}


def coded(rows: int, columns: int) -> Tensor:
    """Return (2, 4, rows, columns) in which every element tells its place."""
    return torch.arange(8 * rows * columns, dtype=torch.float64).view(2, 4, rows, columns)


def on_strips(
    rank: int, world: int, device: torch.device, latent: tuple[int, int], scale: int
) -> tuple[Cut, dict[str, Tensor]]:
    axis = make_mesh(device).replica
    cut = Cut.of(axis, *latent)
    assert cut is not None
    exchanges = Exchanges(axis, collective.Transport())
    strip = cut.take(coded(latent[0] * scale, latent[1] * scale), scale).to(device)
    results = {}
    with torch.no_grad(), StripMode(Strip(cut, exchanges)):
        for name, function in FUNCTIONS.items():
            results[name] = function(strip, WEIGHT.to(device))
    return Cut(Axis("", rank, world), cut.sizes, cut.dim, cut.other), results


# scale 2: two rows of each rank at least, so padded copies; scale 12: also convolutions without a copy
@pytest.mark.parametrize(("latent", "scale"), [((4, 2), 2), ((1, 4), 4), ((4, 2), 12)])
def test_edge_rows_are_the_neighbours(ranks: Pool, latent: tuple[int, int], scale: int) -> None:
    whole = coded(latent[0] * scale, latent[1] * scale)
    for cut, results in ranks.run(3, on_strips, latent, scale):
        for name, result in results.items():
            expected = FUNCTIONS[name](whole, WEIGHT)
            factor = expected.shape[-1] // latent[1]
            torch.testing.assert_close(result.cpu(), cut.take(expected, factor), rtol=1e-12, atol=1e-9, msg=name)


class Side:
    """A stream that records which streams waited for it."""

    def __init__(self) -> None:
        self.waited_for: list[Side] = []

    def wait_stream(self, other: Side) -> None:
        self.waited_for.append(other)


def test_edges_have_arrived_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the memory of a strip would be used again while its edges still travel."""
    here, side = Side(), Side()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    cut = Cut.of(Axis("world"), 9, 4)
    assert cut is not None
    strip = Strip(cut, Exchanges(Axis("world"), collective.Transport()), side=side)  # type: ignore[arg-type]

    def fails(x: Tensor, pad: int) -> Tensor:
        assert here.waited_for == []
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        edges.convolve_strip(strip, coded(9, 4), 1, fails)
    assert (here.waited_for, side.waited_for) == ([side], [here])


class Odd(nn.Module):
    """A type of module that strips do not know."""


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "unknown": (lambda x: x.cumsum(2), "function torch.Tensor.cumsum, which has no rule"),
    "noise": (lambda x: torch.randn_like(x), "function torch.randn_like, which has no rule"),
    "misaligned": (lambda x: F.conv2d(x[:, :, 1:], WEIGHT, padding=1), r"no strip of 2 of the latent's 4"),
    "uneven stride": (lambda x: F.conv2d(x, WEIGHT[..., :1, :1], stride=(1, 2)), r"no strip of 2"),
    "unpadded": (lambda x: F.conv2d(x, WEIGHT), "of a tensor that was not padded"),
    "wide": (lambda x: F.conv2d(x, WEIGHT.repeat(1, 1, 3, 1)[:, :, :7], padding=(3, 1)), "expected at least 3"),
    "mean of rows": (lambda x: x.mean(dim=(2, 3)), "include rows or columns"),
    "mean": (lambda x: x.mean(), "include rows or columns"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "got interpolation 'bilinear'"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "active dropout"),
    "circular": (lambda x: F.pad(x, (0, 0, 1, 1), mode="circular"), "padding of mode 'circular'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name: str) -> None:
    function, message = REFUSED[name]
    axis = Axis("world", 0, 2)  # no exchange is reached
    strip = Strip(Cut(axis, (2, 2), -2, 2), Exchanges(axis, collective.Transport()))
    with pytest.raises(ValueError, match=message), torch.no_grad(), StripMode(strip):
        function(coded(2, 2))


def test_an_unknown_module_and_noise_are_refused_by_name() -> None:
    vae = vaes.tiny("kl")
    assert known.why_untested(vae) is None
    vae.decoder.mid_block.resnets[1].nonlinearity = Odd()
    with pytest.raises(ValueError, match=r"module decoder.mid_block.resnets.1.nonlinearity is a tests.vae.test_rules"):
        ParallelVAE(vae, Mesh.single(), collective.Transport())
    vae = vaes.tiny("ltx")
    block = vae.decoder.up_blocks[0].resnets[0]
    block.per_channel_scale1 = nn.Parameter(torch.zeros(8, 1, 1))
    assert "module decoder.up_blocks.0.resnets.0 (" in str(reason := known.why_untested(vae))
    assert "draws noise" in str(reason)


def test_an_unpadded_strip_of_another_height_is_noticed_although_columns_fit() -> None:
    cut = Cut(Axis("world", 1, 3), (3, 2, 2), -2, 5)
    assert cut.fits(torch.empty(1, 1, 16, 40))
    assert not cut.fits(torch.empty(1, 1, 24, 40))
    assert cut.shares(16) == (24, 16, 16)
