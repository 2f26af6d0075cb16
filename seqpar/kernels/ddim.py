"""Guidance and one step of DDIM, or of DDPM with the model's variances, on this rank's tokens, in place, in one pass.

Both predict the clean x0 from the state x and the guided prediction m, clip it, and go from there to the next state.
For DDPM the model's output holds two halves: the prediction, and for each of its elements v, which interpolates the
logarithm of the variance between its bounds (-1: the posterior's variance, 1: beta). Guidance acts on the prediction;
v is that of the conditional branch.
The state is small (the size of the latents), so the cost is that of launches, of which
plain torch makes twenty to thirty. The kernel reads both predictions, the state and the noise once, and writes the
state once. It reads the step index on the device, so it does not wait for the host and a CUDA graph can replay it.
Guidance is computed in the dtype of the state, the step in that of the coefficients (DDPM: fp64). Products and sums are
rounded one by one, as in plain torch, so that the kernel and the reference give the same bits.
Source: DDIM (arXiv 2010.02502, formulas 12 and 16), DDPM (arXiv 2006.11239, formula 7), learned variances (arXiv
2102.09672, formula 15), classifier-free guidance (arXiv 2207.12598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl

BLOCK = 512


@dataclass(frozen=True)
class Update:
    """The coefficients of all S steps of a run, and the noise of some of them; every tensor is contiguous.

    For state x, guided prediction m and noise z: x0 = c0 x + c1 m, clipped to +-c2 (infinity: not at all). DDIM has 8
    coefficients in the dtype of the state: e = c3 x + c4 m, or c3 x + c4 x0 if `clipped`; the next state is
    c5 x0 + c6 e + c7 z. DDPM (`learned`) has 7 in fp64: the next state is c3 x0 + c4 x + exp(c5 + c6 v) z.
    guidance_S: one scale a step, for the first `guided` columns of a token (None: for all). noise_TnlC: z of the steps
    from `first` (a device scalar) on, zeros for a step without noise; None for DDIM without noise. guidance_S and
    noise_TnlC have the dtype of the state.
    """

    coefficients_SK: Tensor
    guidance_S: Tensor
    guided: int | None = None
    noise_TnlC: Tensor | None = None
    first: Tensor | None = None
    clipped: bool = False
    learned: bool = False


# images, tokens, columns of the state, columns of the model's output; DDPM takes those with twice as many columns
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

    cond, uncond: the model's outputs, (n, l, M), predictions in the first C columns and, for DDPM, v in the next C;
    uncond is None without guidance. step: the index of this step, a scalar on the device. bad: the first step that gave
    a non-finite value, a scalar of the same kind, which the kernel updates; it starts at the number of steps.
    """
    (launch if fused(tokens_nlC) else reference)(tokens_nlC, cond_nlM, uncond_nlM, update, step, bad)


def reference(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, update: Update, step: Tensor, bad: Tensor
) -> None:
    index, width = step.view(1), tokens_nlC.shape[-1]
    x0_x, x0_m, clip, *c = update.coefficients_SK.index_select(0, index)[0].unbind()
    scale = update.guidance_S.index_select(0, index)[0]
    m = guide(tokens_nlC, cond_nlM, uncond_nlM, scale, update.guided).to(clip.dtype)
    x, z = tokens_nlC.to(clip.dtype), None
    x0 = (x0_x * x + x0_m * m).clamp(-clip, clip)
    if update.noise_TnlC is not None and update.first is not None:
        z = update.noise_TnlC.index_select(0, index - update.first)[0].to(clip.dtype)
    if update.learned:
        v = cond_nlM[..., width : 2 * width].to(clip.dtype)
        new, sigma = c[0] * x0 + c[1] * x, (c[2] + c[3] * v).exp()
    else:
        new, sigma = c[2] * x0 + c[3] * (c[0] * x + c[1] * (x0 if update.clipped else m)), c[4]
    tokens_nlC.copy_(new if z is None else new + sigma * z)
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
    """Run the kernel of `guided_step`. All tensors must be contiguous, the model's outputs only within a token."""
    images, tokens, width = tokens_nlC.shape
    table, noise = update.coefficients_SK, update.noise_TnlC
    check_contiguous(torch.float32, state=tokens_nlC, guidance=update.guidance_S, noise=noise)
    check_contiguous(torch.float64 if update.learned else torch.float32, coefficients=table)
    strides = strides_of(cond_nlM, uncond_nlM, width * (2 if update.learned else 1))
    step_kernel[(-(-tokens * width // BLOCK), images)](
        *(tokens_nlC, cond_nlM, uncond_nlM, noise, table, update.guidance_S),
        *(step, update.first, bad, tokens, *strides),
        C=width,
        GUIDED=width if update.guided is None else update.guided,
        K=table.shape[1],
        CLIPPED=update.clipped,
        LEARNED=update.learned,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # without fused multiply-adds the bits are those of plain torch
    )


def check_contiguous(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor, None apart, is not contiguous or of another dtype."""
    for name, tensor in tensors.items():
        if tensor is not None and not (tensor.is_contiguous() and tensor.dtype == dtype):
            raise ValueError(f"got {name} {tensor.dtype} {tensor.stride()}, expected contiguous {dtype}")


def strides_of(cond_nlM: Tensor, uncond_nlM: Tensor | None, width: int) -> list[int]:
    """Return the strides of images and tokens of both outputs; ValueError if a token has not `width` columns in row."""
    strides: list[int] = []
    for output in (cond_nlM, uncond_nlM):
        if output is not None and (output.stride(-1) != 1 or output.shape[-1] < width):
            raise ValueError(f"got outputs {tuple(output.shape)}, expected at least {width} contiguous columns")
        strides += [0, 0] if output is None else output.stride()[:2]
    return strides


@jit
def step_kernel(
    state,
    cond,
    uncond,
    noise,
    table,
    guidance,
    step,
    first,
    bad,
    tokens,
    cond_image,
    cond_token,
    uncond_image,
    uncond_token,
    C: tl.constexpr,
    GUIDED: tl.constexpr,
    K: tl.constexpr,
    CLIPPED: tl.constexpr,
    LEARNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image, here, mask, token, column = places(tokens, C, BLOCK)
    index = tl.load(step).to(tl.int64)
    c = table + index * K
    dtype: tl.constexpr = table.dtype.element_ty
    state += image * tokens * C + here
    x = tl.load(state, mask, 0.0).to(dtype)
    cond += image * cond_image + token * cond_token + column
    m = tl.load(cond, mask, 0.0).to(tl.float32)
    if uncond is not None:
        m = guided(m, uncond + image * uncond_image + token * uncond_token, column, guidance + index, mask, GUIDED)
    m = m.to(dtype)
    x0 = tl.load(c) * x + tl.load(c + 1) * m
    clip = tl.load(c + 2)  # comparisons keep NaN, as torch's clamp does; minimum and maximum would hide it
    x0 = tl.where(x0 > clip, clip, x0)
    x0 = tl.where(x0 < -clip, -clip, x0)
    z = x  # replaced where there is noise
    if noise is not None:
        row = index - tl.load(first).to(tl.int64)
        z = tl.load(noise + (row * tl.num_programs(1) + image) * tokens * C + here, mask, 0.0).to(dtype)
    if LEARNED:
        sigma = tl.exp(tl.load(c + 5) + tl.load(c + 6) * tl.load(cond + C, mask, 0.0).to(dtype))
        new = tl.load(c + 3) * x0 + tl.load(c + 4) * x + sigma * z
    else:
        if CLIPPED:
            m = x0
        new = tl.load(c + 5) * x0 + tl.load(c + 6) * (tl.load(c + 3) * x + tl.load(c + 4) * m)
        if noise is not None:
            new += tl.load(c + 7) * z
    new = new.to(tl.float32)
    tl.store(state, new, mask)
    note(new, mask, index, bad)


@jit
def places(tokens, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the image of a program, its places in the state, whether they exist, and their tokens and columns."""
    image = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = here < tokens * C
    return image, here, mask, (here // C).to(tl.int64), here % C


@jit
def guided(m, uncond, column, scale, mask, GUIDED: tl.constexpr):
    """Guide the conditional prediction; uncond: the first column of each token. The columns past GUIDED stay."""
    u = tl.load(uncond + column, mask, 0.0).to(tl.float32)
    return tl.where(column < GUIDED, u + tl.load(scale) * (m - u), m)


@jit
def note(new, mask, index, bad):
    """Lower `bad` to this step if a new value is not finite."""
    broken = tl.sum((mask & ~(tl.abs(new) < float("inf"))).to(tl.int32), 0) != 0
    tl.atomic_min(bad, index, mask=broken, sem="relaxed")
