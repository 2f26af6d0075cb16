"""Tests of local attentions and their log-sum-exp against the formula, of merging them, and of the choice of one."""

from __future__ import annotations

import pytest
import torch

import seqpar.local
from seqpar.kernels.merge import merge
from seqpar.local import flash, reference, sdpa
from seqpar.planner.plan import choose_local
from seqpar.types.masks import key_bias
from seqpar.types.plugins import plugins
from tests.conftest import DEVICE
from tests.support.meshes import random

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 16), ((6, 2), 8), ((3, 1), 72)])
def test_sdpa_takes_strided_views_of_a_packed_projection(
    dtype: torch.dtype, bound: float, heads: tuple[int, int], dim: int
) -> None:
    packed = random((2, 9, heads[0] + 2 * heads[1], dim), 0, dtype=dtype)
    q, k, v = packed.split((heads[0], heads[1], heads[1]), dim=2)
    out, lse = sdpa.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert lse.shape == (2, heads[0], 9)
    assert (out - truth).abs().max() < bound
    assert (lse - truth_lse).abs().max() < bound


def masks(batch: int, tokens: int) -> torch.Tensor:
    """Return a mask that keeps some keys of the first row, one key of the second, and none of the last."""
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[0, ::3] = True
    mask[1, -1] = True
    return mask


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_sdpa_with_a_key_mask_equals_the_formula_over_the_keys_that_are_kept(heads: tuple[int, int]) -> None:
    q, k, v = (random((3, 11, n, 8), seed) for seed, n in enumerate((heads[0], heads[1], heads[1])))
    mask = masks(3, 11)
    for given in (mask, key_bias(mask, q.dtype)):
        for core in (sdpa, reference):
            out, lse = core.attend(q, k, v, given)
            for row in range(2):
                some = k[row : row + 1, mask[row]], v[row : row + 1, mask[row]]
                truth, truth_lse = reference.attend(q[row : row + 1], *some)
                assert (out[row] - truth[0]).abs().max() < 1e-13
                assert (lse[row] - truth_lse[0]).abs().max() < 1e-12
            assert out.isfinite().all()
            assert (lse[2] < -1e300).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_whose_keys_are_all_masked_has_no_weight(dtype: torch.dtype, order: tuple[int, int]) -> None:
    """This holds in either order, by the formula and by torch's kernels; if both are masked, nothing is NaN."""
    q, k, v = (random((2, 7, 3, 8), seed, dtype=dtype) for seed in range(3))
    none = torch.zeros(2, 7, dtype=torch.bool)
    for core in (sdpa, reference):
        kept = core.attend(q, k, v)
        parts = [kept, core.attend(q, k.flip(1), 100 * v, none)]
        out, lse = merge(*merge(None, None, *parts[order[0]]), *parts[order[1]])
        assert torch.equal(out, kept[0].to(out.dtype))
        assert torch.equal(lse, kept[1].to(lse.dtype))
        empty = core.attend(q, k, v, none)
        out, lse = merge(*merge(None, None, *(x.clone() for x in empty)), *empty)
        assert out.isfinite().all()
        assert torch.equal(merge(out, lse, *kept)[0], kept[0].to(out.dtype))


def test_a_mask_that_is_off_by_one_key_is_noticed() -> None:
    q, k, v = (random((3, 11, 2, 8), seed) for seed in range(3))
    mask = masks(3, 11)
    assert (sdpa.attend(q, k, v, mask.roll(1, 1))[0] - sdpa.attend(q, k, v, mask)[0])[:2].abs().max() > 1e-2


def test_masks_choose_a_local_attention_that_takes_them() -> None:
    cuda, x = torch.device("cuda"), random((1, 2, 1, 8), 0)
    assert flash.why_not(cuda, torch.bfloat16, 128, True) == "takes no key masks"
    assert sdpa.why_not(cuda, torch.bfloat16, 128, True) is None
    assert choose_local("auto", CPU, torch.float32, 64, True).name == "sdpa"
    with pytest.raises(ValueError, match="does not support key masks"):
        flash.attend(x, x, x, torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got a key bias of torch.float32, expected torch.float64"):
        sdpa.attend(x, x, x, torch.zeros(1, 2))


@pytest.mark.parametrize("spread", [1.0, 80.0])
def test_merge_of_two_halves_is_attention_over_both(spread: float) -> None:
    q, k, v = (random((2, 7, 3, 8), seed) for seed in range(3))
    k = k * spread  # log-sum-exps far apart must not overflow
    out = lse = None
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        out, lse = merge(out, lse, *reference.attend(q, k[:, part], v[:, part]))
    truth, truth_lse = reference.attend(q, k, v)
    assert out is not None
    assert lse is not None
    assert (out - truth).abs().max() < 1e-12
    assert (lse - truth_lse).abs().max() < 1e-11


def test_a_choice_says_why_and_what_does_not_fit_is_refused_with_the_reason() -> None:
    choice = choose_local("auto", CPU, torch.float32, 64)
    assert choice.name == "sdpa"
    assert "cpu" in choice.why
    with pytest.raises(ValueError, match=r"'flash', which does not work here: needs a GPU; expected one of .*sdpa"):
        choose_local("flash", CPU, torch.float32, 64)
    with pytest.raises(
        ValueError, match=f"got local attention 'flush', expected one of {', '.join(plugins(seqpar.local))}"
    ):
        choose_local("flush", CPU, torch.float32, 64)
    cuda = torch.device("cuda")
    takes = {dim: sdpa.why_not(cuda, torch.bfloat16, dim) is None for dim in (72, 256, 264, 512, 60)}
    assert takes == {72: True, 256: True, 264: True, 512: True, 60: False}
    assert sdpa.why_not(cuda, torch.float32, 320) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),  # fp32 may use tf32
    [("sdpa", torch.bfloat16, 5e-3), ("flash", torch.bfloat16, 5e-3), ("sdpa", torch.float32, 1e-3)],
)
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2)])
def test_gpu_local_attention_is_as_good_as_its_dtype_allows(
    name: str, dtype: torch.dtype, bound: float, dim: int, heads: tuple[int, int]
) -> None:
    """Attention reads strided views of a token-major slab."""
    module, where = {"sdpa": sdpa, "flash": flash}[name], torch.device(DEVICE)
    if (reason := module.why_not(where, dtype, dim)) is not None:
        pytest.skip(reason)
    slab = random((257, 2, heads[0] + 2 * heads[1], dim), 0, where, dtype).transpose(0, 1)
    q, k, v = slab.split((heads[0], heads[1], heads[1]), dim=2)
    out, lse = module.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    assert (out.double() - truth).norm() / truth.norm() < bound
    assert (lse.double() - truth_lse).abs().max() < (1e-4 if dtype == torch.bfloat16 else 1e-2)
    assert lse.dtype == torch.float32
    assert lse.shape == (2, heads[0], 257)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "tokens"), [((6, 6), 257), ((6, 2), 515)])
def test_gpu_sdpa_with_a_key_mask(dtype: torch.dtype, dim: int, heads: tuple[int, int], tokens: int) -> None:
    """Rows keep some keys, one key or none; the columns of a ring's block may begin at any key."""
    q, k, v = (random((3, tokens, n, dim), i, DEVICE, dtype) for i, n in enumerate((heads[0], heads[1], heads[1])))
    mask = masks(3, tokens).to(DEVICE)
    bias = key_bias(mask, dtype)
    truth, truth_lse = reference.attend(q.double(), k.double(), v.double(), mask)
    for given in (mask, bias):
        out, lse = sdpa.attend(q, k, v, given)
        assert (out[:2].double() - truth[:2]).norm() / truth[:2].norm() < 5e-3
        assert (lse[:2].double() - truth_lse[:2]).abs().max() < 1e-2
        assert out.isfinite().all()
        assert (lse[2] < -1e4).all()
    part = slice(5, tokens)
    out, _ = sdpa.attend(q, k[:, part], v[:, part], bias[:, part])
    truth, _ = reference.attend(q.double(), k[:, part].double(), v[:, part].double(), mask[:, part])
    assert (out[:2].double() - truth[:2]).norm() / truth[:2].norm() < 5e-3


def test_the_formula_takes_many_scores_by_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random((2, 11, n, 8), seed) for seed, n in enumerate((4, 2, 2)))
    whole = reference.attend(q, k, v, masks(2, 11))
    monkeypatch.setattr(reference, "MOST", 3 * 2 * 4 * 11)
    for got, expected in zip(reference.attend(q, k, v, masks(2, 11)), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
