"""Guidance and a DDPM step with the model's variance on this rank's tokens, in place, in one pass.

The model's output holds two halves: the prediction, and for each of its elements v, which interpolates the logarithm of
the variance between its bounds (-1: the posterior's variance, 1: beta). Guidance acts on the prediction; v is that of
the conditional branch. The step is x' = a clip(x0) + b x + sigma z with log(sigma) = c + d v.
When it wins: always on a GPU. The state is small, so the cost is that of launches, of which plain torch makes about
thirty. The kernel reads the step index on the device, so a CUDA graph can replay it. Guidance is computed in the dtype
of the state, the step in fp64, one operation at a time, as in plain torch.
Source: DDPM (arXiv 2006.11239, formula 7), learned variances (arXiv 2102.09672, formula 15), classifier-free guidance
(arXiv 2207.12598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl
from seqpar.kernels.ddim import CASES as DDIM_CASES
from seqpar.kernels.ddim import guide

BLOCK = 512


@dataclass(frozen=True)
class Steps:
    """The coefficients of all S steps of a run, and the noise of some of them; every tensor is contiguous.

    For state x, guided prediction m, the model's v and noise z: x0 = c0 x + c1 m, clipped to +-c6 (infinity: not at
    all); the next state is c2 x0 + c3 x + exp(c4 + c5 v) z. coefficients_S7 is fp64. guidance_S: one scale a step, for
    the first `guided` columns of a token (None: for all). noise_TnlC: z of the steps from `first` (a device scalar) on,
    zeros for a step without noise. guidance_S and noise_TnlC have the dtype of the state.
    """

    coefficients_S7: Tensor
    guidance_S: Tensor
    noise_TnlC: Tensor
    first: Tensor
    guided: int | None = None


# images, tokens, columns of the state, columns of the model's output, which are twice as many
CASES = tuple(case for case in DDIM_CASES if case["outputs"] == 2 * case["columns"])


def guided_ddpm(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    """Advance the state (n, l, C), fp32 or fp64, by one step, in place.

    cond, uncond: the model's outputs, (n, l, M >= 2 C), predictions before interpolations v; uncond is None without
    guidance. step: the index of this step, a scalar on the device. bad: the first step that gave a non-finite value, a
    scalar of the same kind, which the kernel updates; it starts at the number of steps.
    """
    (launch if fused(tokens_nlC, cond_nlM, uncond_nlM) else reference)(
        tokens_nlC, cond_nlM, uncond_nlM, steps, step, bad
    )


def reference(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    """Compute `guided_ddpm` in plain torch, also without waiting for the host."""
    index, width = step.view(1), tokens_nlC.shape[-1]
    x0_x, x0_m, keep, stay, middle, slope, clip = steps.coefficients_S7.index_select(0, index)[0].unbind()
    m = guide(tokens_nlC, cond_nlM, uncond_nlM, steps.guidance_S.index_select(0, index)[0], steps.guided).double()
    x, v = tokens_nlC.double(), cond_nlM[..., width : 2 * width].double()
    x0 = (x0_x * x + x0_m * m).clamp(-clip, clip)
    noise = steps.noise_TnlC.index_select(0, index - steps.first)[0].double()
    tokens_nlC.copy_(keep * x0 + stay * x + (middle + slope * v).exp() * noise)
    torch.where(tokens_nlC.isfinite().all(), bad, torch.minimum(bad, step), out=bad)


def launch(
    tokens_nlC: Tensor, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    """Run the kernel of `guided_ddpm`. State, coefficients and noise must be contiguous, outputs within a token."""
    images, tokens, width = tokens_nlC.shape
    single, double = torch.float32, torch.float64
    for name, tensor, dtype in (
        ("state", tokens_nlC, single),
        ("table of coefficients", steps.coefficients_S7, double),
        ("guidance", steps.guidance_S, single),
        ("noise", steps.noise_TnlC, single),
    ):
        if not (tensor.is_contiguous() and tensor.dtype == dtype):
            raise ValueError(f"got a {name} {tensor.dtype} {tensor.stride()}, expected contiguous {dtype}")
    strides: list[int] = []
    for output in (cond_nlM, uncond_nlM):
        if output is not None and (output.stride(-1) != 1 or output.shape[-1] < 2 * width):
            raise ValueError(f"got outputs {tuple(output.shape)}, expected at least {2 * width} contiguous columns")
        strides += [0, 0] if output is None else output.stride()[:2]
    guided = width if steps.guided is None else steps.guided
    tensors = (tokens_nlC, cond_nlM, uncond_nlM, steps.noise_TnlC, steps.coefficients_S7, steps.guidance_S)
    # without fused multiply-adds the bits are those of plain torch
    ddpm_kernel[(-(-tokens * width // BLOCK), images)](
        *tensors,
        step,
        steps.first,
        bad,
        tokens,
        *strides,
        C=width,
        GUIDED=guided,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


@jit
def ddpm_kernel(
    state,
    cond,
    uncond,
    noise,
    coefficients,
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
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = here < tokens * C
    token, column = (here // C).to(tl.int64), here % C
    now = tl.load(step).to(tl.int64)
    row = now - tl.load(first).to(tl.int64)
    c = coefficients + now * 7
    state += image * tokens * C + here
    x = tl.load(state, mask, 0.0).to(tl.float64)
    cond += image * cond_image + token * cond_token + column
    m = tl.load(cond, mask, 0.0).to(tl.float32)
    v = tl.load(cond + C, mask, 0.0).to(tl.float64)
    if uncond is not None:
        u = tl.load(uncond + image * uncond_image + token * uncond_token + column, mask, 0.0).to(tl.float32)
        m = tl.where(column < GUIDED, u + tl.load(guidance + now) * (m - u), m)
    x0 = tl.load(c) * x + tl.load(c + 1) * m.to(tl.float64)
    clip = tl.load(c + 6)  # comparisons keep NaN, as torch's clamp does; minimum and maximum would hide it
    x0 = tl.where(x0 > clip, clip, x0)
    x0 = tl.where(x0 < -clip, -clip, x0)
    drawn = tl.load(noise + (row * tl.num_programs(1) + image) * tokens * C + here, mask, 0.0).to(tl.float64)
    sigma = tl.exp(tl.load(c + 4) + tl.load(c + 5) * v)
    new = (tl.load(c + 2) * x0 + tl.load(c + 3) * x + sigma * drawn).to(tl.float32)
    tl.store(state, new, mask)
    broken = tl.sum((mask & ~(tl.abs(new) < float("inf"))).to(tl.int32), 0) != 0
    tl.atomic_min(bad, now, mask=broken, sem="relaxed")
