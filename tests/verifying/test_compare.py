"""Tests of errors and bounds against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from seqpar.verifying.compare import Comparison, Error, Place, bound, digest, error, first_unequal

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


def found_over(*errors: Error) -> str | None:
    """Return the first place that is over the bound where one rank has an error of 0.01 and at most 0.1 everywhere."""
    measured = Comparison(torch.bfloat16)
    for step, each in reversed([*enumerate(errors)]):
        measured.add(Place(step), each, Error(0.01, 0.1))
    first = measured.first()
    return None if first is None else str(first.place)


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


def test_bounds_have_a_floor_for_wide_types_only_and_something_is_compared() -> None:
    assert bound(Error(1e-7, 1e-6), torch.float32) == Error(1e-5, 4e-5)
    assert Error(1e-9, 1e-9).why_not(bound(Error(0.0, 0.0), torch.float16)) is not None
    with pytest.raises(ValueError, match="nothing was compared"):
        Comparison(torch.float16).first()
    assert sorted([Place(1), Place(0, 0, 2, 0, "latents"), Place(0, 0, 0, 1, "block 1")])[0].name == "block 1"


def test_bits_differ_first_where_they_differ() -> None:
    x = torch.arange(4.0)
    nearly = torch.nextafter(x, x + 1)
    assert digest({"a": x}) == digest({"a": x.clone()}) != digest({"a": nearly})
    assert digest({"a": x}) != digest({"b": x})
    assert digest({"a": x[1].expand(1)}) == digest({"a": x[1]}) == digest({"a": x[1:2]})  # as pipelines pass timesteps
    first, second = Place(0), Place(1)
    bits = {second: "b", first: "a"}
    assert first_unequal(bits, dict(bits)) is None
    assert first_unequal(bits, {second: "c", first: "c"}) == first
    assert first_unequal(bits, {first: "a"}) == second
