"""Tests that strips in turn make diffusers' picture in less memory, and never overwrite what somebody still reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.planner.decoder import count
from seqpar.transports._folder import load
from seqpar.vae import pending, rows
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.turns import in_turns
from tests.support import vaes
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

SIZE = (1, 7, 3)  # batch, rows and columns of latents: an odd height, which strips divide unevenly
FP64 = torch.float64


def whole(name: str) -> tuple[Tensor, Tensor]:
    """Return what diffusers decodes and encodes."""
    vae = vaes.tiny(name, FP64)
    decoded = vaes.decoded(vae, vaes.latents(name, *SIZE, FP64), *vaes.extra(name, SIZE[0], FP64))
    return decoded, vaes.encoded(vae, vaes.pictures(name, *SIZE, FP64))


def turned(name: str, strip_bytes: int, held_bytes: int = 0) -> tuple[Tensor, Tensor]:
    vae, extra = vaes.tiny(name, FP64), vaes.extra(name, SIZE[0], FP64)
    z, x = vaes.latents(name, *SIZE, FP64), vaes.pictures(name, *SIZE, FP64)
    decoded = in_turns(lambda: vaes.decoded(vae, z, *extra), None, strip_bytes, held_bytes)
    return decoded, in_turns(lambda: vaes.encoded(vae, x), None, strip_bytes, held_bytes)


def furthest(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "strip_bytes", "held_bytes"),
    [("kl", 1, 0), ("kl", 5000, 0), ("kl", 700, 20000), ("wan", 700, 0), ("hunyuan", 5000, 0)],
)
def test_strips_in_turn_make_the_same_picture(name: str, strip_bytes: int, held_bytes: int) -> None:
    found = turned(name, strip_bytes, held_bytes)
    assert all(type(x) is Tensor for x in found)
    assert furthest(found, whole(name)) <= 1e-12


def test_statistics_of_one_strip_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.kernels, "combine", lambda parts: parts[-1])
    assert furthest(turned("kl", 700), whole("kl")) > 1e-3


def test_rows_without_their_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows.Convolution.rows

    def alone(self: rows.Convolution, low: int, high: int) -> Tensor:
        shape = (*self.given[:-2], high if self.stride[-2] == 1 else self.given[-2], self.given[-1])
        return own(replace(self, given=shape), low, high)  # zeros after the strip

    monkeypatch.setattr(rows.Convolution, "rows", alone)
    assert furthest(turned("kl", 700), whole("kl")) > 1e-3


def test_rows_that_are_overwritten_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending.Chain, "reads", lambda self, low, high: iter(()))
    assert furthest(turned("kl", 700), whole("kl")) > 1e-3


def on_ranks(rank: int, world: int, device: torch.device, names: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    results = []
    for name in names:
        parallel = ParallelVAE(vaes.tiny(name, FP64).to(device), make_mesh(device), load("collective").Transport())
        parallel.strip_bytes = 700
        z, x = (make(name, *SIZE, FP64).to(device) for make in (vaes.latents, vaes.pictures))
        results.append((vaes.decoded(parallel, z), vaes.encoded(parallel, x)))
        parallel.release()
    return results


def test_every_rank_decodes_its_strip_in_turns(ranks: Pool) -> None:
    names = ("kl", "wan")
    for results in ranks.run(3, on_ranks, names):
        for name, result in zip(names, results, strict=True):
            assert furthest(result, whole(name)) <= (1e-12 if ranks.device == "cpu" else 1e-9), name


def test_strips_in_turn_hold_less() -> None:
    """Measured on tensors with memory: storages that live at once."""
    vae, z = vaes.tiny("kl", FP64), torch.randn(1, 4, 32, 32, dtype=FP64)
    at_once = count(lambda: vae.decode(z)).peak
    assert count(lambda: in_turns(lambda: vae.decode(z), strip_bytes=1 << 14)).peak < 0.4 * at_once


class Reads(nn.Module):
    """Reads the output of a convolution again after its sum, and changes an input of a norm that still waits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        view = h[:, :2]
        y = self.second(F.silu(x + h))
        late = F.group_norm(y, 2)
        kept = (y - h).mul(2.0)
        y.mul_(3.0)
        return self.second(F.interpolate(late, scale_factor=2.0)).narrow(2, 0, x.shape[2])[..., : x.shape[3]] + (
            kept + h + torch.cat([view, view], 1) + y
        )


class Pads(Reads):
    """Pads a norm that waits, and reads the norm itself before a convolution takes what was padded."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(F.group_norm(self.first(x), 2))
        padded = F.pad(h, (1, 1, 1, 1))
        read = torch.sigmoid(h)
        return F.conv2d(padded, self.second.weight) + read


class Shares(Reads):
    """Reads a convolution that waits twice, the second time after a sum that could be written over its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        h = self.first(y)
        both = h + y
        del y
        return torch.sigmoid(both) + torch.sigmoid(h)


@pytest.mark.parametrize("kind", [Reads, Pads, Shares])
def test_what_somebody_still_reads_is_not_overwritten(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = kind().double(), torch.randn(2, 4, 9, 5, dtype=FP64)
    with torch.no_grad():
        expected = module(x.clone())
    assert (in_turns(lambda: module(x.clone()), strip_bytes=100) - expected).abs().max() <= 1e-12
