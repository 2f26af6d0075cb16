"""A test of `StayDouble`, in which both sides of many comparisons are computed."""

from __future__ import annotations

import pytest
import torch

from tests.support.diffusers_tiny import MODELS, flat, truth
from tests.transformer.test_body import TOLERANCE, error


@pytest.mark.parametrize("name", ["flux", "wan", "lumina2"])
def test_it_leaves_out_roundings_to_fp32_and_nothing_else(name: str) -> None:
    """There must be some, or it is not needed."""
    with torch.no_grad():
        rounded = flat(MODELS[name].build()(**MODELS[name].arguments(torch.device("cpu")), return_dict=False))
    assert TOLERANCE < error(rounded, truth(name, "cpu")) < 1e-4
