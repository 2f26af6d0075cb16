"""The bench of weights fetched ahead, without a GPU: every way makes the same, and its lines make a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import products, table
from launch.chains import AS_IT_IS, MB, Sizes, chains, fetched
from launch.products import ALONE, Product
from seqpar.kernels.ahead import Ahead
from tests.conftest import DEVICE

# numpy's, in the interpreter's activations
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
SMALL = (Sizes("small", 128, 192, 4), Sizes("smaller", 96, 128, 3))
NAMES = ("norm, qkv, small", "gate + norm, w1|w3, small", "SwiGLU, w2, small", "prepare + attention, wo, small",
         "norm, qkv, smaller")  # fmt: skip
ROWS = 8


def small() -> Mapping[str, Product]:
    return {product.name: product for product in chains(SMALL, DEVICE, torch.float16)}


def test_every_kernel_that_a_product_follows_has_a_chain() -> None:
    assert tuple(small()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ways_make_the_same_bits_and_what_the_reference_makes(name: str) -> None:
    product = small()[name]
    data = product.data(ROWS)
    assert (product.columns, product.inner) == data[0].shape
    plain = product.ways[AS_IT_IS](*data)
    assert plain.shape == product.ways[ALONE](*data).shape == (2, ROWS // 2, product.columns)
    assert 0 < (products.error(product.ways[AS_IT_IS], product, data) or 0) < 2e-3
    for way in product.ways.keys() - {ALONE}:
        assert torch.equal(product.ways[way](*data), plain)
    # a negative control: another input, or other weights
    for i in range(2):
        other = [x.roll(1, 0) if j == i else x for j, x in enumerate(data)]
        assert not torch.equal(product.ways[AS_IT_IS](*other), plain)


def test_no_more_is_fetched_than_there_is() -> None:
    """Of the 7B all amounts (w1|w3 is 180 MB), of DiT-XL/2's 8 MB no more than 8."""
    tried = [[way for way in product.ways if way.endswith("ahead")] for product in chains(device="meta")]
    assert tried[0] == [f"{mb} MB ahead" for mb in MB]
    assert tried[-1] == ["2 MB ahead", "4 MB ahead", "8 MB ahead"]


def test_a_way_that_would_fetch_nothing_is_refused() -> None:
    assert fetched(torch.empty(8, 64), 0, False) is None
    assert fetched(torch.empty(8, 64), 0, True) == Ahead(None, 0, True)
    for early in (False, True):
        found = fetched(torch.empty(8, 64), 1, early)
        assert found is not None
        assert found.early is early
    with pytest.raises(ValueError, match=r"got weights of \(8, 66\), expected rows of 16-byte multiples"):
        fetched(torch.empty(8, 66, dtype=torch.float16), 1, False)


def test_its_lines_make_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(ways: Mapping[str, Callable[..., object]], sets: Any, rounds: int) -> dict[str, dict[str, float]]:
        return {name: {"median": 1.0 + i} for i, (name, way) in enumerate(ways.items()) if way(*sets[0]) is not None}

    monkeypatch.setattr(products, "over", lambda size: 1)
    monkeypatch.setattr(products, "timed_over", timed)
    monkeypatch.setattr(products, "environment", lambda device: {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    out = tmp_path / "lines.jsonl"
    products.main(list(small().values()), (ROWS,), 1, out)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(lines) == len(NAMES) * 4  # alone, as it is, 2 MB ahead, early
    (made,) = table.tables(lines)
    for line in lines:
        case = line["case"]
        assert f"| {case['product']} | {ROWS} | {case['way']} | {1e3 * line['ms']['median']:.1f} |" in made
