"""Tests of the noise of all evaluations: parts drawn at the same time have the bits of one draw after the other."""

from __future__ import annotations

import pytest
import torch

from seqpar.loop import loop as noise
from seqpar.loop.loop import Shapes, draw_noise, draw_steps

TEXT: Shapes = {"text": (1, 77, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shapes", "together"),
    [(TEXT, True), ({"image": (1, 4, 32, 32), "clip": (1, 1, 512)}, True), ({"odd": (3, 77, 63)}, False)],
)
def test_parts_have_the_bits_of_one_draw_after_the_other(
    shapes: Shapes, together: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise.os, "cpu_count", lambda: 8)
    asked: list[bool] = []
    joined = noise._in_parts
    monkeypatch.setattr(noise, "_in_parts", lambda *given: asked.append(True) or joined(*given))
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (one, other):
        torch.randn(3, generator=generator)  # an odd number: the generator keeps a value for the next draw
    made = draw_steps(shapes, 23, one, dtype)
    turns = [{name: draw_noise(shape, other, dtype) for name, shape in shapes.items()} for _ in range(23)]
    assert asked == [True] * (together and dtype != torch.float32)
    for name in shapes:
        assert torch.equal(made[name], torch.stack([turn[name] for turn in turns]))
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("cause", ["another consumption", "no block"])
def test_noise_is_the_same_where_parts_do_not_join(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.os, "cpu_count", lambda: 8)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    shapes: Shapes = {"odd": (3, 77, 63)}
    if cause == "no block":
        monkeypatch.setattr(noise, "BLOCK", 1)  # these counts draw some values again, which the check must see
        assert noise._in_parts(shapes, noise.Shard(8, 2), one, torch.bfloat16) is None
    else:
        shapes = TEXT
        monkeypatch.setattr(noise, "_in_parts", lambda *given: None)
    made = draw_steps(shapes, 8, one, torch.bfloat16)["text" if shapes is TEXT else "odd"]
    truth = torch.stack([draw_noise(shape, other, torch.bfloat16) for _ in range(8) for shape in shapes.values()])
    assert torch.equal(made, truth)
    assert torch.equal(one.get_state(), other.get_state())
