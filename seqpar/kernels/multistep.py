"""Guidance and one step of any linear scheduler on this rank's tokens, with the history in ring buffers, in one pass.

For state x_i and guided prediction o_i: x_(i+1) = sum_j a_j x_(i-j) + sum_j b_j o_(i-j) + noise_i, and the model sees
x_(i+1) times the next step's input scale. The step counter on the device selects coefficients, guidance scales and
slots of the history, so a CUDA graph can replay the step. History whose coefficient is zero is not read, because it may
belong to another run or be NaN.
Plain torch makes more than twenty launches for a step on latents. With one state
and one output it moves the same bytes as DDIM: it reads x and both predictions and writes x. Each further slot of
history adds one read. States with history are kept in fp64, because differences of states lose digits; the model's
input is then a separate tensor. Guidance is computed in the dtype of the model's input, the sum in fp64. The kernel
rounds products and sums one by one, as plain torch does, so that kernel and reference give the same bits.
Source: the coefficients come from `seqpar.loop.schedules`; classifier-free guidance is arXiv 2207.12598.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl
from seqpar.kernels.ddim import check_contiguous, guide, guided, note, places, strides_of

BLOCK = 512


@dataclass(frozen=True)
class Steps:
    """The coefficients of all S steps of a run with P states and Q outputs a step; every tensor is contiguous.

    table_SK, fp64: K = 1 + P + Q coefficients a step: the scale of the model's next input, a_0 .. a_(P-1), b_0 ..
    b_(Q-1). guidance_S: one scale a step, for the first `guided` columns of a token (None: for all). noise_SnlC: the
    noise that is added, already weighted (None: no noise). These two have the dtype of the model's input.
    """

    table_SK: Tensor
    guidance_S: Tensor
    guided: int | None = None
    noise_SnlC: Tensor | None = None


@dataclass(frozen=True)
class History:
    """The ring buffers: x_i is in slot i % P of states_PnlC, o_i is written to slot i % (Q - 1) of outputs_QnlC.

    outputs_QnlC has Q - 1 slots and is None if Q is 1. seen_nlC is the model's input; it is None if P is 1 and the
    state itself is the model's input. States are fp64 if there is a separate model's input.
    """

    states_PnlC: Tensor
    outputs_QnlC: Tensor | None
    seen_nlC: Tensor | None


# images, tokens, columns of the state, columns of the model's output, states, outputs, whether the input is separate
CASES: tuple[dict[str, int], ...] = (
    {"images": 1, "tokens": 1, "columns": 16, "outputs": 32, "P": 1, "Q": 1, "seen": 0},
    {"images": 3, "tokens": 85, "columns": 16, "outputs": 32, "P": 2, "Q": 2, "seen": 1},
    {"images": 2, "tokens": 5, "columns": 12, "outputs": 12, "P": 3, "Q": 4, "seen": 1},
    {"images": 1, "tokens": 130, "columns": 64, "outputs": 64, "P": 1, "Q": 3, "seen": 0},
    {"images": 1, "tokens": 5, "columns": 16, "outputs": 32, "P": 1, "Q": 1, "seen": 1},
    {"images": 1, "tokens": 4096, "columns": 16, "outputs": 32, "P": 2, "Q": 2, "seen": 1},
    {"images": 1, "tokens": 16384, "columns": 16, "outputs": 32, "P": 1, "Q": 1, "seen": 0},
    {"images": 4, "tokens": 16384, "columns": 64, "outputs": 64, "P": 3, "Q": 3, "seen": 1},
)


def guided_multistep(
    history: History, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    """Advance the state (n, l, C) by one step, in place.

    cond, uncond: the model's outputs, (n, l, M >= C), of which the first C columns are used; uncond is None without
    guidance. step: the index of this step, a scalar on the device. bad: the first step that gave a non-finite value, a
    scalar of the same kind, which the kernel updates; it starts at the number of steps.
    """
    (launch if fused(cond_nlM) else reference)(history, cond_nlM, uncond_nlM, steps, step, bad)


def reference(
    history: History, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    states, outputs = history.states_PnlC, history.outputs_QnlC
    index, slots = step.view(1), len(states)
    scale, *weights = steps.table_SK.index_select(0, index)[0].unbind()
    x, guidance = _slot(states, index), steps.guidance_S.index_select(0, index)[0]
    m = guide(x.to(guidance.dtype), cond_nlM, uncond_nlM, guidance, steps.guided)
    new = weights[0] * x.double() + weights[slots] * m.double()
    for j in range(1, slots):
        new = new + weights[j] * _used(_slot(states, index - j), weights[j])
    if outputs is not None:
        for j in range(1, len(outputs) + 1):
            new = new + weights[slots + j] * _used(_slot(outputs, index - j), weights[slots + j])
        outputs.index_copy_(0, index.remainder(len(outputs)), m[None])
    if steps.noise_SnlC is not None:
        new = new + steps.noise_SnlC.index_select(0, index)[0].double()
    states.index_copy_(0, (index + 1).remainder(slots), new[None].to(states.dtype))
    if history.seen_nlC is not None:
        history.seen_nlC.copy_(scale * new)
    kept = new.to(guidance.dtype)
    torch.where(kept.isfinite().all(), bad, torch.minimum(bad, step), out=bad)


def _slot(ring_RnlC: Tensor, index: Tensor) -> Tensor:
    return ring_RnlC.index_select(0, index.remainder(len(ring_RnlC)))[0]


def _used(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` in fp64, or zeros if its weight is zero, because an earlier run may have left NaN there."""
    return torch.where(weight != 0, x.double(), 0.0)


def launch(
    history: History, cond_nlM: Tensor, uncond_nlM: Tensor | None, steps: Steps, step: Tensor, bad: Tensor
) -> None:
    """Run the kernel of `guided_multistep`. All tensors must be contiguous, predictions only within a token."""
    states, outputs, seen = history.states_PnlC, history.outputs_QnlC, history.seen_nlC
    slots, images, tokens, width = states.shape
    count = 1 if outputs is None else len(outputs) + 1
    table, guidance = steps.table_SK, steps.guidance_S
    check_contiguous(torch.float32, outputs=outputs, input=seen, guidance=guidance, noise=steps.noise_SnlC)
    check_contiguous(torch.float64, table=table)
    check_contiguous(torch.float32 if seen is None else torch.float64, state=states)
    if table.shape[1] != 1 + slots + count:
        raise ValueError(f"got a table {tuple(table.shape)}, expected 1 + {slots} + {count} columns")
    strides = strides_of(cond_nlM, uncond_nlM, width)
    multistep_kernel[(-(-tokens * width // BLOCK), images)](
        *(states, outputs, seen, cond_nlM, uncond_nlM, steps.noise_SnlC, table, guidance),
        *(step, bad, tokens, *strides),
        C=width,
        GUIDED=width if steps.guided is None else steps.guided,
        P=slots,
        Q=count,
        BLOCK=BLOCK,
        # a thread holds 16 bytes of the state: with twice as much of fp64, Triton 3.6 spills
        num_warps=BLOCK * states.element_size() // (16 * 32),
        enable_fp_fusion=False,  # without fused multiply-adds the bits are those of plain torch
    )


@jit
def multistep_kernel(
    states,
    outputs,
    seen,
    cond,
    uncond,
    noise,
    table,
    guidance,
    step,
    bad,
    tokens,
    cond_image,
    cond_token,
    uncond_image,
    uncond_token,
    C: tl.constexpr,
    GUIDED: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image, here, mask, token, column = places(tokens, C, BLOCK)
    index = tl.load(step).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * tokens * C  # elements of a slot
    at = image * tokens * C + here
    row = table + index * (1 + P + Q)
    x = tl.load(states + (index % P) * size + at, mask, 0.0)
    m = tl.load(cond + image * cond_image + token * cond_token + column, mask, 0.0).to(tl.float32)
    if uncond is not None:
        m = guided(m, uncond + image * uncond_image + token * uncond_token, column, guidance + index, mask, GUIDED)
    new = tl.load(row + 1) * x.to(tl.float64) + tl.load(row + 1 + P) * m.to(tl.float64)
    # + P and + Q keep the slots of steps before the first from being negative; their weights are zero: no read
    for j in tl.static_range(1, P):  # pyright: ignore[reportGeneralTypeIssues]
        weight = tl.load(row + 1 + j)
        used = here < tl.where(weight != 0, tokens * C, 0)
        new += weight * tl.load(states + ((index + P - j) % P) * size + at, used, 0.0).to(tl.float64)
    for j in tl.static_range(1, Q):  # pyright: ignore[reportGeneralTypeIssues]
        weight = tl.load(row + 1 + P + j)
        used = here < tl.where(weight != 0, tokens * C, 0)
        new += weight * tl.load(outputs + ((index + Q - 1 - j) % (Q - 1)) * size + at, used, 0.0).to(tl.float64)
    if Q > 1:
        tl.store(outputs + (index % (Q - 1)) * size + at, m, mask)
    if noise is not None:
        new += tl.load(noise + index * size + at, mask, 0.0).to(tl.float64)
    tl.store(states + ((index + 1) % P) * size + at, new.to(states.dtype.element_ty), mask)
    if seen is not None:
        tl.store(seen + at, (tl.load(row) * new).to(tl.float32), mask)
    note(new.to(tl.float32), mask, index, bad)
