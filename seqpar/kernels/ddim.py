"""Guidance and the DDIM update of this rank's tokens, in place, with the check for NaN and infinity, in one pass.

When it wins: always on a GPU. The state is small (the size of the latents), so the cost is that of launches, of which
plain torch makes about twenty. The kernel reads both predictions, the state and the noise once, and writes the state
once. It reads the step index on the device, so it does not wait for the host and a CUDA graph can replay it. It rounds
products and sums one by one, as plain torch does, so that the kernel and the reference give the same bits.
Source: DDIM (arXiv 2010.02502, formulas 12 and 16), classifier-free guidance (arXiv 2207.12598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl

BLOCK = 512


@dataclass(frozen=True)
class Update:
    """The coefficients of all S steps of a run.

    For state x and guided prediction m: x0 = c0 x + c1 m, clipped to +-clip; e = c2 x + c3 m; the next state is
    c4 x0 + c5 e + c6 noise. guidance_S: one scale a step, for the first `guided` columns of a token (None: for all).
    clipped: e = c2 x + c3 x0 instead, from the clipped x0. coefficients_S7, guidance_S and noise_SnlC have the dtype of
    the state.
    """

    coefficients_S7: Tensor
    guidance_S: Tensor
    guided: int | None = None
    clip: float | None = None
    noise_SnlC: Tensor | None = None
    clipped: bool = False


# images, tokens, columns of the state, columns of the model's output
CASES: tuple[dict[str, int], ...] = (
    {"images": 1, "tokens": 1, "columns": 16, "outputs": 32},
    {"images": 3, "tokens": 85, "columns": 16, "outputs": 32},
    {"images": 2, "tokens": 5, "columns": 12, "outputs": 12},
    {"images": 1, "tokens": 130, "columns": 64, "outputs": 64},
    {"images": 1, "tokens": 4096, "columns": 16, "outputs": 32},
    {"images": 1, "tokens": 16384, "columns": 16, "outputs": 32},
    {"images": 4, "tokens": 16384, "columns": 64, "outputs": 64},
)


def guided_step(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, update: Update, step: Tensor, bad: Tensor
) -> None:
    """Advance the state (n, l, C), fp32 or fp64, by one step, in place.

    cond, uncond: the model's outputs, (n, l, M >= C), of which the first C columns are used; uncond is None without
    guidance. step: the index of this step, a scalar on the device. bad: the first step that gave a non-finite value, a
    scalar of the same kind, which the kernel updates; it starts at the number of steps.
    """
    (launch if fused(tokens_nlC, cond_nlM, uncond_nlM) else reference)(
        tokens_nlC, cond_nlM, uncond_nlM, update, step, bad
    )


def reference(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, update: Update, step: Tensor, bad: Tensor
) -> None:
    """Compute `guided_step` in plain torch, also without waiting for the host."""
    index = step.view(1)
    x0_x, x0_m, e_x, e_m, keep, direction, sigma = update.coefficients_S7.index_select(0, index)[0].unbind()
    m = guide(tokens_nlC, cond_nlM, uncond_nlM, update.guidance_S.index_select(0, index)[0], update.guided)
    x0 = x0_x * tokens_nlC + x0_m * m
    x0 = x0 if update.clip is None else x0.clamp(-update.clip, update.clip)
    tokens = keep * x0 + direction * (e_x * tokens_nlC + e_m * (x0 if update.clipped else m))
    if update.noise_SnlC is not None:
        tokens = tokens + sigma * update.noise_SnlC.index_select(0, index)[0]
    tokens_nlC.copy_(tokens)
    torch.where(tokens_nlC.isfinite().all(), bad, torch.minimum(bad, step), out=bad)


def guide(
    state_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, scale: float | Tensor, guided: int | None = None
) -> Tensor:
    """Return u + scale (c - u) in the first `guided` columns (None: all) and c in the rest, shaped like the state.

    The result has the dtype of the state, too.
    """
    width = state_nlC.shape[-1]
    cond = cond_nlM[..., :width].to(state_nlC.dtype)
    if uncond_nlM is None:
        return cond
    guided = width if guided is None else guided
    uncond = uncond_nlM[..., :guided].to(state_nlC.dtype)
    mixed = uncond + scale * (cond[..., :guided] - uncond)
    return mixed if guided == width else torch.cat((mixed, cond[..., guided:]), dim=-1)


def launch(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, update: Update, step: Tensor, bad: Tensor
) -> None:
    """Run the kernel of `guided_step`. State, coefficients and noise must be contiguous, predictions within a token."""
    images, tokens, width = tokens_nlC.shape
    noise = update.noise_SnlC
    for name, tensor in (
        ("state", tokens_nlC),
        ("table of coefficients", update.coefficients_S7),
        ("guidance", update.guidance_S),
        ("noise", noise),
    ):
        if tensor is not None and not (tensor.is_contiguous() and tensor.dtype == torch.float32):
            raise ValueError(f"got a {name} {tensor.dtype} {tensor.stride()}, expected contiguous fp32")
    strides: list[int] = []
    for output in (cond_nlM, uncond_nlM):
        if output is not None and (output.stride(-1) != 1 or output.shape[-1] < width):
            raise ValueError(f"got predictions {tuple(output.shape)}, expected at least {width} contiguous columns")
        strides += [0, 0] if output is None else output.stride()[:2]
    guided = width if update.guided is None else update.guided
    clip = update.clip or 0.0
    # without fused multiply-adds the bits are those of plain torch
    tensors = (tokens_nlC, cond_nlM, uncond_nlM, noise, update.coefficients_S7, update.guidance_S)
    ddim_kernel[(-(-tokens * width // BLOCK), images)](
        *tensors,
        step,
        bad,
        tokens,
        clip,
        *strides,
        C=width,
        GUIDED=guided,
        CLIP=update.clip is not None,
        CLIPPED=update.clipped,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


@jit
def ddim_kernel(
    state,
    cond,
    uncond,
    noise,
    coefficients,
    guidance,
    step,
    bad,
    tokens,
    clip,
    cond_image,
    cond_token,
    uncond_image,
    uncond_token,
    C: tl.constexpr,
    GUIDED: tl.constexpr,
    CLIP: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = here < tokens * C
    token, column = (here // C).to(tl.int64), here % C
    now = tl.load(step).to(tl.int64)
    c = coefficients + now * 7
    state += image * tokens * C + here
    x = tl.load(state, mask, 0.0)
    m = tl.load(cond + image * cond_image + token * cond_token + column, mask, 0.0).to(tl.float32)
    if uncond is not None:
        u = tl.load(uncond + image * uncond_image + token * uncond_token + column, mask, 0.0).to(tl.float32)
        m = tl.where(column < GUIDED, u + tl.load(guidance + now) * (m - u), m)
    x0 = tl.load(c) * x + tl.load(c + 1) * m
    if CLIP:  # comparisons keep NaN, as torch's clamp does; minimum and maximum would hide it
        x0 = tl.where(x0 > clip, clip, x0)
        x0 = tl.where(x0 < -clip, -clip, x0)
    if CLIPPED:
        m = x0
    new = tl.load(c + 4) * x0 + tl.load(c + 5) * (tl.load(c + 2) * x + tl.load(c + 3) * m)
    if noise is not None:
        drawn = tl.load(noise + (now * tl.num_programs(1) + image) * tokens * C + here, mask, 0.0)
        new += tl.load(c + 6) * drawn
    tl.store(state, new, mask)
    broken = tl.sum((mask & ~(tl.abs(new) < float("inf"))).to(tl.int32), 0) != 0
    tl.atomic_min(bad, now, mask=broken, sem="relaxed")
