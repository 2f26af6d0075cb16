"""Tests of errors, bounds and the measures of pictures, against their formulas."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from seqpar.fidelity.compare import Error, Place, bound, digest, error, first_over, first_unequal
from seqpar.fidelity.pictures import likeness, load_lpips, psnr, ssim, why_no_lpips

NAN = math.nan


def test_an_error_is_relative_to_the_reference_over_all_streams() -> None:
    truth = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[0.0, 5.0]])}
    got = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([[0.0, 5.0]])}
    found, unit = error(got, truth), math.sqrt(50 / 4)
    assert found == Error(pytest.approx(0.25 / unit), pytest.approx(0.5 / unit))  # pyright: ignore[reportArgumentType]
    assert error(truth, truth) == Error(0.0, 0.0)
    for bad in (NAN, math.inf):  # anywhere, also where a maximum alone might overlook it
        broken = error({**got, "a": torch.tensor([bad, 4.0])}, truth)
        assert math.isnan(broken.rms)
        assert math.isnan(broken.largest)
    with pytest.raises(ValueError, match="expected the same names and shapes"):
        error({"a": torch.ones(3), "b": truth["b"]}, truth)


def found_over(*errors: Error, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return the first place that is over the bound where one rank has an error of 0.01 and at most 0.1 everywhere."""
    places = [Place(step) for step in range(len(errors))]
    bounds = {place: bound(Error(0.01, 0.1), dtype) for place in places}
    found = first_over(dict(zip(reversed(places), reversed(errors), strict=True)), bounds)
    return None if found is None else str(found.place)


@pytest.mark.parametrize(
    ("errors", "place"),
    [
        ((Error(0.0124, 0.1), Error(0.0124, 0.1)), None),
        ((Error(0.008, 0.1), Error(0.015, 0.3), Error(0.009, 0.1)), None),  # one step scatters
        ((Error(0.012, 0.1), Error(0.0135, 0.1), Error(0.0135, 0.1)), "prediction of step 2"),  # all of them do not
        ((Error(0.001, 0.1), Error(0.001, 0.1), Error(0.03, 0.1)), "prediction of step 3"),
        ((Error(0.011, 0.1), Error(0.011, 0.5)), "prediction of step 2"),  # few tokens are wrong
        ((Error(NAN, NAN), Error(0.0, 0.0)), "prediction of step 1"),
    ],
    ids=str,
)
def test_the_first_place_over_the_bound_is_named(errors: tuple[Error, ...], place: str | None) -> None:
    assert found_over(*errors) == place


def test_bounds_have_a_floor_for_wide_types_only_and_all_places_need_one() -> None:
    assert bound(Error(1e-7, 1e-6), torch.float32) == Error(1e-5, 4e-5)
    assert Error(1e-9, 1e-9).why_not(bound(Error(0.0, 0.0), torch.float16)) is not None
    for errors in ({}, {Place(0): Error(0, 0), Place(1): Error(0, 0)}):
        with pytest.raises(ValueError, match="expected the same places"):
            first_over(errors, {Place(0): Error(1.0, 1.0)})
    assert sorted([Place(1), Place(0, 2, "latents"), Place(0, 1, "block 1")])[0].name == "block 1"


def test_bits_differ_first_where_they_differ() -> None:
    x = torch.arange(4.0)
    nearly = torch.nextafter(x, x + 1)
    assert digest({"a": x}) == digest({"a": x.clone()}) != digest({"a": nearly})
    assert digest({"a": x}) != digest({"b": x})
    assert digest({"a": x[1].expand(1)}) == digest({"a": x[1]}) == digest({"a": x[1:2]})  # as pipelines pass timesteps
    assert first_unequal("aab", "aab") is None
    assert (first_unequal("aab", "abb"), first_unequal("aa", "aab")) == (1, 2)


def test_psnr_and_ssim_are_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 3, 14, 12, generator=generator)
    got = (truth + 0.1 * torch.randn(truth.shape, generator=generator)).clamp(0, 1)
    expected = [10 * math.log10(1 / float((a - b).double().pow(2).mean())) for a, b in zip(got, truth, strict=True)]
    assert psnr(got, truth).tolist() == pytest.approx(expected)
    offsets = [(i - 5, j - 5) for i in range(11) for j in range(11)]
    weights = torch.tensor([math.exp(-(i * i + j * j) / (2 * 1.5**2)) for i, j in offsets], dtype=torch.float64)
    weights = weights / weights.sum()
    values = []
    for top in range(4):  # one window after the other, by the definitions of weighted moments
        for left in range(2):
            x, y = (z[0, :, top : top + 11, left : left + 11].reshape(3, -1).double() for z in (got, truth))
            mx, my = (x * weights).sum(1), (y * weights).sum(1)
            vx, vy = (weights * (x - mx[:, None]) ** 2).sum(1), (weights * (y - my[:, None]) ** 2).sum(1)
            both = (weights * (x - mx[:, None]) * (y - my[:, None])).sum(1)
            above = (2 * mx * my + 1e-4) * (2 * both + 9e-4)
            values.append(above / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert float(ssim(got, truth)[0]) == pytest.approx(float(torch.stack(values).mean()))
    same = likeness(truth, truth)
    assert (same.psnr, same.ssim, same.lpips) == (math.inf, pytest.approx(1.0), None)
    assert likeness(got, truth).psnr == pytest.approx(min(expected))
    with pytest.raises(ValueError, match="expected at least 11 x 11"):
        ssim(truth[:, :, :10], truth[:, :, :10])


def test_without_a_file_or_its_package_lpips_is_left_out_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--lpips" in (why_no_lpips(None) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_lpips(Path("alexnet.pth")) == "the package lpips and torchvision is not installed"


class Stub(nn.Module):
    """The package's network, cut down: slices keep torchvision's indices, and the distance is a mean difference."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        assert options == {"net": "alex", "pnet_rand": True, "verbose": False}  # downloads nothing
        self.net = nn.ModuleDict({"slice1": nn.ModuleDict({"0": nn.Linear(2, 3)})})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[2:] == (84, 72)  # enlarged for AlexNet's pools
        return (x - y).abs().mean(dim=(1, 2, 3), keepdim=True)


def test_lpips_takes_torchvisions_tensors_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Stub))
    path, weight, bias = tmp_path / "alexnet.pth", torch.rand(3, 2), torch.rand(3)
    torch.save({"features.0.weight": weight, "features.0.bias": bias, "classifier.1.bias": bias}, path)
    network = load_lpips(path)
    assert [x.tolist() for x in network.net.parameters()] == [weight.tolist(), bias.tolist()]
    zeros = torch.zeros(2, 3, 14, 12)
    assert likeness(zeros + 0.25, zeros, lambda x, y: Stub.forward(network, x, y)).lpips == pytest.approx(0.5)
    for content, message in (
        ({"features.0.weight": bias}, "expected an AlexNet"),
        (Path("x"), "holding a PurePosixPath"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            load_lpips(path)
