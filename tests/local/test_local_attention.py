"""Local attentions against the formula, log-sum-exp included; the ring's merge; the choice among them."""

from __future__ import annotations

import pytest
import torch

from seqpar.kernels.merge import merge
from seqpar.local import flash, reference, sdpa
from seqpar.planner.choose import choose_local
from tests.conftest import DEVICE
from tests.support.meshes import random

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dim", [8, 72])
def test_sdpa_on_the_cpu_equals_the_formula(heads: tuple[int, int], dim: int) -> None:
    q, k, v = (random((2, 11, n, dim), seed) for seed, n in enumerate((heads[0], heads[1], heads[1])))
    (out, lse), (truth, truth_lse) = sdpa.attend(q, k, v), reference.attend(q, k, v)
    assert (out - truth).abs().max() < 1e-13
    assert (lse - truth_lse).abs().max() < 1e-12
    assert lse.shape == (2, heads[0], 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_takes_strided_views_of_a_packed_projection(dtype: torch.dtype) -> None:
    packed = random((2, 9, 3, 4, 16), 0, dtype=dtype)
    q, k, v = packed.unbind(2)
    out, lse = sdpa.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert (out - truth).abs().max() < bound
    assert (lse - truth_lse).abs().max() < bound


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


def test_merge_negative_control_forgetting_a_part_is_noticed() -> None:
    q, k, v = (random((2, 7, 3, 8), seed) for seed in range(3))
    out, lse = merge(None, None, *reference.attend(q, k[:, :3], v[:, :3]))
    out, _ = merge(out, lse, *reference.attend(q, k[:, 4:], v[:, 4:]))
    assert (out - reference.attend(q, k, v)[0]).abs().max() > 1e-2


def test_auto_on_the_cpu_says_what_and_why() -> None:
    choice = choose_local("auto", CPU, torch.float32, 64)
    assert choice.name == "sdpa"
    assert "cpu" in choice.why


def test_a_local_attention_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'flash', which does not work here: needs a GPU; expected one of sdpa"):
        choose_local("flash", CPU, torch.float32, 64)
    with pytest.raises(ValueError, match=r"got local attention 'flush', expected one of flash, reference, sdpa"):
        choose_local("flush", CPU, torch.float32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "flash"])
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2)])
def test_gpu_local_attention_is_as_good_as_bf16_allows(name: str, dim: int, heads: tuple[int, int]) -> None:
    """Strided views of a token-major slab; the error against fp64 is that of rounding the result to bf16."""
    module, where = {"sdpa": sdpa, "flash": flash}[name], torch.device(DEVICE)
    if (reason := module.why_not(where, torch.bfloat16, dim)) is not None:
        pytest.skip(reason)
    slab = random((257, 2, heads[0] + 2 * heads[1], dim), 0, where, torch.bfloat16).transpose(0, 1)
    q, k, v = slab.split((heads[0], heads[1], heads[1]), dim=2)
    out, lse = module.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    assert (out.double() - truth).norm() / truth.norm() < 5e-3
    assert (lse.double() - truth_lse).abs().max() < 1e-4
    assert lse.dtype == torch.float32
    assert lse.shape == (2, heads[0], 257)


@pytest.mark.gpu
def test_gpu_sdpa_fp32() -> None:
    q, k, v = (random((2, 130, 3, 72), seed, DEVICE, torch.float32) for seed in range(3))
    out, lse = sdpa.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    assert (out.double() - truth).norm() / truth.norm() < 1e-3  # the kernel may use tf32
    assert (lse.double() - truth_lse).abs().max() < 1e-2


@pytest.mark.parametrize(("dim", "takes"), [(72, True), (256, True), (264, False), (320, False), (60, False)])
def test_sdpa_says_which_head_dims_it_takes_in_half_precision(dim: int, takes: bool) -> None:
    cuda = torch.device("cuda")
    assert (sdpa.why_not(cuda, torch.bfloat16, dim) is None) == takes
    assert sdpa.why_not(cuda, torch.float32, 320) is None
