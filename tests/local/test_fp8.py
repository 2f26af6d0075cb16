"""Tests of attention in 8 bits against fp32: its error, what it loses of the values' mean, and what must be noticed.

On a CPU sums are exact, so that the loss of a mean, and the need for centres, show on GPUs alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.kernels import prepare8 as kernel
from seqpar.kernels.merge import merge
from seqpar.kernels.prepare8 import prepare8, restored
from seqpar.kernels.rows8 import E4M3
from seqpar.local import fp8, reference
from seqpar.planner.plan import choose_local
from seqpar.transformer import attention8
from seqpar.transformer.attention8 import MEANS, MOST, Watched, rounding_of
from seqpar.types.protocols import Prepare, Qkv8
from tests.conftest import DEVICE
from tests.kernels.shared import gpu
from tests.support.meshes import random

ERROR, BIAS = 6.5e-2, 3e-3
DIM, HEADS = 64, 3
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPE = torch.bfloat16 if DEVICE.startswith("cuda") else torch.float32
WITH_MEANS = ("means", "drift", "heads")  # of values: the mean of the output is not small
Qkv = tuple[Tensor, Tensor, Tensor]


def normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def data(kind: str, keys: int, queries: int, dim: int = DIM) -> Qkv:
    """Return q, k and v (1, L, H, D), q and k as after a norm of each head."""
    q, k, v = (random((1, n, HEADS, dim), seed, dtype=torch.float32) for seed, n in enumerate((queries, keys, keys)))
    q, k, channels = normed(q), normed(k), random((HEADS, dim), 9, dtype=torch.float32)
    if kind == "outliers":  # channels of k and of v
        k[..., :8] *= 12
        k, v = normed(k), v * (1 + 11 * (torch.arange(dim) % 16 == 5))
    elif kind == "channels":  # few carry the products of q and k, as weights of their norms make them
        sizes = random((dim,), 8, dtype=torch.float32).exp()
        q, k = normed(sizes * q), normed(sizes * k)
    elif kind == "offsets":  # of k
        k = k + 12 * (torch.arange(dim) < 8)
    elif kind == "peaked":  # each query is four times a key
        q = 4 * k[:, torch.arange(queries) * 7 % keys]
    elif kind == "flat":
        q = q / 100
    elif kind == "means":
        v = v + channels
    elif kind == "heads":  # of other sizes
        v, k = (v + channels) * 50.0 ** (torch.arange(HEADS)[:, None] - 1), k * 3.0 ** torch.arange(HEADS)[:, None]
        q = q / 3.0 ** torch.arange(HEADS)[:, None]
    elif kind == "drift":  # of values along the keys, which queries follow
        turn = torch.linspace(0, 6.28, keys)[:, None, None]
        v = v + channels + 2 * channels.flip(0) * turn.cos()
        places = turn[torch.arange(queries) * keys // queries]
        for x, at in ((q, places), (k, turn)):
            x[..., :2] += 6 * torch.cat([at.cos(), at.sin()], dim=-1)
    return q.to(DEVICE, DTYPE), k.to(DEVICE, DTYPE), v.to(DEVICE, DTYPE)


def eight_of(q: Tensor, k: Tensor, v: Tensor) -> Qkv8:
    seen = Watched()
    seen.look(q, k, v)
    numbers = seen.numbers()
    eight = rounding_of(numbers[MEANS], numbers[MOST], q.dtype, q.device)
    assert eight is not None
    return eight


def attended(q: Tensor, k: Tensor, v: Tensor, eight: Qkv8) -> Tensor:
    return restored(fp8.attend(*prepare8(q, k, v, Prepare(eight=eight)))[0], eight, q.dtype)


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def bias(got: Tensor, truth: Tensor) -> float:
    """Return the mean over queries of the difference, relative to that of the truth."""
    return error(got.double().mean(1), truth.mean(1))


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attend(*(x.float() for x in (q, k, v)))[0].double()


KINDS = ("normal", "outliers", "channels", "offsets", "peaked", "flat", *WITH_MEANS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [7, 65, 1000, *(pytest.param(n, marks=gpu) for n in (4096, 4608, fp8.MOST_KEYS))])
def test_error_and_bias_are_small_for_any_values(kind: str, keys: int) -> None:
    if (reason := fp8.why_not(torch.device(DEVICE), DTYPE, DIM)) is not None:
        pytest.skip(reason)
    for dim in (DIM, 128) if keys > 4000 else (DIM,):
        q, k, v = data(kind, keys, min(keys, 1024), dim)
        got, truth = attended(q, k, v, eight_of(q, k, v)), formula(q, k, v)
        assert error(got, truth) < ERROR
        if kind == "heads":  # one scale is enough for all
            assert all(error(a, b) < ERROR for a, b in zip(got.unbind(2), truth.unbind(2), strict=True))
        if keys >= 1000 and kind in WITH_MEANS:
            assert bias(got, truth) < BIAS


def test_rounding_values_to_8_bits_moves_no_mean() -> None:
    """bf16 values halfway between two of e4m3 must not all go to the side of a small centre, as by a power of two."""
    q, k, v = (x.cpu().bfloat16() for x in data("normal", 8192, 4, 128))
    right = eight_of(q, k, v)

    def moved(eight: Qkv8) -> float:
        v8 = prepare8(q, k, v, Prepare(eight=eight))[2]
        off = (v8.double() / eight.v_scale + eight.v_centre_GD.double() - v.double()).mean(1)
        return float(off.square().mean().sqrt()) * 8192**0.5

    assert moved(right) < 0.04  # a random error of 2.6 % has such a mean
    assert moved(replace(right, v_scale=right.v_scale / attention8.UNTIED)) > 0.08


@gpu
def test_gpu_negative_controls_a_mean_is_lost_uncentred_and_a_drift_with_many_keys() -> None:
    if (reason := fp8.why_not(CUDA, torch.bfloat16, 128)) is not None:
        pytest.skip(reason)
    q, k, v = data("means", 4608, 512, 128)
    assert bias(fp8.attend(q, k, v)[0], formula(q, k, v)) > 10 * BIAS
    for keys in (32760, 130000):
        q, k, v = data("drift", keys, 256, 128)
        assert bias(attended(q, k, v, eight_of(q, k, v)), formula(q, k, v)) > BIAS


@gpu
def test_gpu_a_querys_bits_do_not_depend_on_other_queries_or_heads() -> None:
    if (reason := fp8.why_not(CUDA, torch.bfloat16, 128)) is not None:
        pytest.skip(reason)
    q, k, v = data("means", 4608, 1024, 128)
    q, k, v = prepare8(q, k, v, Prepare(eight=eight_of(q, k, v)))
    whole = fp8.attend(q, k, v)
    for rows in (slice(0, 37), slice(200, 1001)):
        for heads in (slice(0, 1), slice(1, 3)):
            got = fp8.attend(q[:, rows, heads], k[:, :, heads], v[:, :, heads])
            assert torch.equal(got[0], whole[0][:, rows, heads])
            assert torch.equal(got[1], whole[1][:, heads, rows])
    strided = torch.cat([x.transpose(0, 1) for x in (q[:, :1000], k[:, :1000], v[:, :1000])], dim=2).transpose(0, 1)
    got, want = fp8.attend(*strided.split(HEADS, dim=2)), fp8.attend(q[:, :1000], k[:, :1000], v[:, :1000])
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("fault", ["no centre", "another head's centre", "another scale of v", "another scale of k"])
def test_negative_control_faults_are_seen(fault: str) -> None:
    q, k, v = data("heads", 200, 50)
    right, truth = eight_of(q, k, v), formula(q, k, v)
    given = prepare8(q, k, v, Prepare(eight=right))
    restoring, asked = right, right
    if fault == "no centre":
        restoring = replace(right, v_centre_GD=torch.zeros_like(right.v_centre_GD))
    elif fault == "another head's centre":
        restoring = replace(right, v_centre_GD=right.v_centre_GD.roll(1, 0))
    elif fault == "another scale of v":
        restoring = replace(right, v_scale=right.v_scale / 4)
    else:
        asked = replace(right, k_scale_G=4 * right.k_scale_G)
    given = (prepare8(q, k, v, Prepare(eight=asked))[0], *given[1:])
    assert error(restored(fp8.attend(*given)[0], restoring, DTYPE), truth) > ERROR


def test_negative_control_few_channels_need_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.cpu().float() for x in data("channels", 1000, 100, 128))
    truth, turned = formula(q, k, v), attended(q, k, v, eight_of(q, k, v))
    for module in (kernel, attention8):
        monkeypatch.setattr(module, "rotated", lambda x: x)
    assert error(attended(q, k, v, eight_of(q, k, v)), truth) > 2 * error(turned, truth)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_log_sum_exps_merge_parts_and_other_dtypes_are_rounded_first(heads: tuple[int, int]) -> None:
    q, k, v = (random((2, 11, n, 32), seed, DEVICE, DTYPE) for seed, n in enumerate((heads[0], heads[1], heads[1])))
    if (reason := fp8.why_not(torch.device(DEVICE), DTYPE, 32)) is not None:
        pytest.skip(reason)
    out, lse = fp8.attend(q, k, v)
    truth, truth_lse = reference.attend(*(x.double() for x in (q, k, v)))
    assert (out.dtype, lse.dtype, lse.shape) == (DTYPE, torch.float32, (2, heads[0], 11))
    assert error(out, truth) < ERROR
    assert (lse - truth_lse).abs().max() < 0.1
    parts = [fp8.attend(q, k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 11))]
    merged, merged_lse = merge(*merge(None, None, *parts[0]), *parts[1])
    assert error(merged, truth) < ERROR
    assert (merged_lse - lse).abs().max() < 1e-5
    with pytest.raises(ValueError, match="does not support key masks"):
        fp8.attend(q, k, v, torch.ones(2, 11, dtype=torch.bool))


def test_rows_and_the_order_of_keys_do_not_change_bits_on_a_cpu() -> None:
    q, k, v = (random((1, 50, 2, 32), seed).to(E4M3) for seed in range(3))
    out, lse = fp8.attend(q, k, v)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fp8.attend(q[:, 7:20], k, v)[0], out[:, 7:20])
    assert torch.equal(fp8.attend(q, k[:, order], v[:, order])[0], out)
    assert torch.equal(fp8.attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])[1], lse[:, 1:])


def test_it_must_be_named_and_says_what_it_takes() -> None:
    assert choose_local("fp8", CPU, torch.float32, 64).name == "fp8"
    assert "fp8" not in choose_local("auto", CPU, torch.float32, 64).why
    assert fp8.why_not(CUDA, torch.bfloat16, 72) == "takes head dims that 16 divides, not 72"
    assert fp8.why_not(CUDA, torch.float32, 64) == "takes bf16 and head dims to 256, not float32 and 64"
    with pytest.raises(ValueError, match=r"'fp8', which does not work here: takes head dims that 16 divides, not 72"):
        choose_local("fp8", CPU, torch.float32, 72)


def test_scores_that_e4m3_cannot_hold_are_refused() -> None:
    q, k, v = data("normal", 20, 20)
    seen = Watched()
    seen.look(300 * q, 300 * k, v)
    numbers = seen.numbers()
    assert rounding_of(numbers[MEANS], numbers[MOST], DTYPE, CPU) is None
    empty = eight_of(0 * q, 0 * k, 0 * v)  # of zeros
    assert empty.k_scale_G.isfinite().all()
    assert not attended(0 * q, 0 * k, 0 * v, empty).any()
