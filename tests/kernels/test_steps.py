"""Tests of guidance with a scheduler's step in one kernel, DDIM and DDPM or any linear one: the reference's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import ddim, multistep
from seqpar.kernels.ddim import Update
from seqpar.kernels.multistep import History, Steps
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu
from tests.support.pairs import covering

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
Call = Callable[..., None]
BAD = [float("nan"), float("inf"), -float("inf")]


def sizes(module: Any) -> list[Any]:
    """Return small cases and those of GPUs: on CPUs an image is a few elements larger than a block."""
    small = [
        {**case, "tokens": min(case["tokens"], module.BLOCK // case["columns"] + 3)}
        for case in module.CASES
        if case["tokens"] <= 130  # the interpreter needs milliseconds for each program
    ]
    return [*small, *(pytest.param(case, marks=gpu) for case in module.CASES)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def counters(step: int, steps: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(step, device=DEVICE), torch.tensor(steps, device=DEVICE)


# DDIM, and DDPM with the model's variances ------------------------------------------------------------------------

KINDS = ["ddim", "ddpm"]
STEPS = 3
BOUNDS = torch.tensor((1.0, float("inf"), 0.7))  # of the clipping in each step
CHANGES: dict[str, dict[str, Any]] = {
    "guided": {},
    "all channels": {"guided": None},
    "one branch, strided": {},
    "no noise": {"noise_TnlC": None},
    "clipped": {"clipped": True},
}


def data(
    case: dict[str, int], kind: str = "ddim", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Update]:
    """Return the state, both branches (two halves of one output) and all steps; noise is loaded from step 1 on."""
    images, tokens, columns, outputs = (case[name] for name in ("images", "tokens", "columns", "outputs"))
    cond, uncond = draw(2 * images, tokens, outputs, seed=0).to(dtype).chunk(2)
    noise, guidance = draw(2, images, tokens, columns, seed=2), torch.tensor((4.0, 1.3, 7.7), device=DEVICE)
    table, first = draw(STEPS, 7 if kind == "ddpm" else 8, seed=1), torch.tensor(1, device=DEVICE)
    table[:, 2] = BOUNDS.to(DEVICE)
    table = table.double() if kind == "ddpm" else table
    update = Update(table, guidance, columns // 4 * 3, noise, first, learned=kind == "ddpm")
    return draw(images, tokens, columns, seed=3), cond, uncond, update


# DDPM has neither of the last two changes
WAYS = [pytest.param(kind, change) for kind in KINDS for change in CHANGES][:8]


@pytest.mark.parametrize(("case", "kind", "change", "dtype"), covering(sizes(ddim), WAYS, turns=DTYPES, rest=gpu))
def test_kernel_gives_the_bits_of_plain_torch(case: dict[str, int], dtype: torch.dtype, kind: str, change: str) -> None:
    if kind == "ddpm" and case["outputs"] < 2 * case["columns"]:
        case = {**case, "outputs": 2 * case["columns"]}
    state, cond, uncond, update = data(case, kind, dtype)
    update, branch = replace(update, **CHANGES[change]), uncond
    if change.endswith("strided"):
        cond, branch = cond.transpose(0, 1).contiguous().transpose(0, 1), None
    for step in (1, 2):  # one without clipping, one with
        got, want = state.clone(), state.clone()
        index, bad = counters(step, STEPS)
        ddim.launch(got, cond, branch, update, index, bad)
        ddim.reference(want, cond, branch, update, index, bad)
        assert torch.equal(got, want)
        assert int(bad) == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_papers_arithmetic(kind: str) -> None:
    """In fp64; DDPM's variance as it is written: fractions of two logarithms, of the conditional branch."""
    *tensors, update = data(ddim.CASES[1], kind)
    assert update.noise_TnlC is not None
    x, c, u, z = (tensor.double() for tensor in (*tensors, update.noise_TnlC[1]))
    a, scale = update.coefficients_SK[2].double(), update.guidance_S[2].double()
    m = c[..., :16].clone()
    m[..., :12] = u[..., :12] + scale * (c[..., :12] - u[..., :12])
    x0 = (a[0] * x + a[1] * m).clamp(-a[2], a[2])
    if kind == "ddim":
        want = a[5] * x0 + a[6] * (a[3] * x + a[4] * m) + a[7] * z
    else:
        low, high = 2 * (a[5] - a[6]), 2 * (a[5] + a[6])  # logarithms of the variance at v = -1 and v = 1
        fraction = (c[..., 16:] + 1) / 2
        want = a[3] * x0 + a[4] * x + torch.exp(0.5 * (fraction * high + (1 - fraction) * low)) * z
    wide = {name: value.double() for name, value in vars(update).items() if name.endswith(("_SK", "_S", "_TnlC"))}
    index, bad = counters(2, STEPS)
    ddim.guided_step(x, c, u, replace(update, **wide), index, bad)
    assert float(((x - want) / want.abs().clamp_min(1)).abs().max()) < 1e-12


def test_a_token_does_not_depend_on_the_others() -> None:
    state, cond, uncond, update = data(ddim.CASES[3])
    whole, index, bad = state.clone(), *counters(1, STEPS)
    ddim.launch(whole, cond, uncond, replace(update, noise_TnlC=None), index, bad)
    part = state[:, 40:45].clone()
    ddim.launch(part, cond[:, 40:45], uncond[:, 40:45], replace(update, noise_TnlC=None), index, bad)
    assert torch.equal(part, whole[:, 40:45])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("kind", "column"), [("ddim", 15), ("ddpm", 15), ("ddpm", 31)])
@pytest.mark.parametrize("call", [ddim.launch, ddim.reference])
def test_the_first_bad_step_is_kept(call: Callable[..., None], kind: str, column: int, value: float) -> None:
    state, cond, uncond, update = data(ddim.CASES[1], kind)
    index, bad = counters(1, STEPS)
    cond[2, 84, column] = abs(value) if column == 31 else value  # exp(-inf) is a variance of 0
    uncond[..., 16:] = float("nan")  # columns that do not count: the other branch's variances, and padding
    update.coefficients_SK[:, 6] = update.coefficients_SK[:, 6].abs()
    call(state, cond, uncond, update, index, bad)
    assert int(bad) == 1
    assert int(state.isfinite().logical_not().sum()) == 1
    call(state, cond, uncond, update, index + 1, bad)
    assert int(bad) == 1


def test_swapped_branches_and_other_steps_are_noticed() -> None:
    """This is a negative control."""
    state, cond, uncond, update = data(ddim.CASES[1])
    results = []
    for first, second, step in ((cond, uncond, 1), (uncond, cond, 1), (cond, uncond, 2)):
        index, bad = counters(step, STEPS)
        results.append(state.clone())
        ddim.launch(results[-1], first, second, update, index, bad)
    assert float((results[0] - results[1]).abs().max()) > 0.1
    assert float((results[0] - results[2]).abs().max()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernel_cannot_take_is_refused(kind: str) -> None:
    state, cond, uncond, update = data(ddim.CASES[1], kind)
    index, bad = counters(1, STEPS)
    with pytest.raises(ValueError, match=r"got state torch\.float32 .*, expected contiguous torch\.float32"):
        ddim.launch(state.transpose(0, 1), cond, uncond, update, index, bad)
    with pytest.raises(ValueError, match=rf"at least {32 if kind == 'ddpm' else 16} contiguous columns"):
        ddim.launch(state, cond[..., :8], uncond, update, index, bad)


# Linear schedulers with a history -------------------------------------------------------------------------------

RUN = 5


def run_of(case: dict[str, int], dtype: torch.dtype = torch.float32) -> tuple[History, list[tuple[Tensor, ...]], Steps]:
    """Return a history with NaN in unused slots, both predictions of every step, and steps that do not use NaN."""
    images, tokens, columns, width, states, outputs, _ = case.values()
    predictions = [tuple(draw(2 * images, tokens, width, seed=i).to(dtype).chunk(2)) for i in range(RUN)]
    table = draw(RUN, 1 + states + outputs, seed=10).double() / 2
    for step in range(RUN):
        table[step, 1 + step + 1 : 1 + states] = 0.0
        table[step, 1 + states + step + 1 :] = 0.0
    noise, guidance = draw(RUN, images, tokens, columns, seed=11), 1 + 3 * draw(RUN, seed=12).abs()
    return history(case), predictions, Steps(table, guidance, columns // 4 * 3, noise)


def history(case: dict[str, int]) -> History:
    """Return the history before the first step; states are fp64 if the model's input is a separate tensor."""
    images, tokens, columns, _, states, outputs, apart = case.values()
    shape = images, tokens, columns
    dtype = torch.float64 if apart else torch.float32
    kept = torch.full((states, *shape), float("nan"), device=DEVICE, dtype=dtype)
    kept[0] = draw(*shape, seed=13)
    past = torch.full((outputs - 1, *shape), float("nan"), device=DEVICE) if outputs > 1 else None
    return History(kept, past, kept[0].float() if apart else None)


def copied(history: History) -> History:
    values: dict[str, Any] = {name: None if x is None else x.clone() for name, x in vars(history).items()}
    return History(**values)


def tensors(history: History) -> list[Tensor]:
    return [x for x in vars(history).values() if x is not None]


def play(call: Call, history: History, predictions: list[tuple[Tensor, ...]], steps: Steps, guided: bool = True) -> int:
    """Take all steps, and return the first bad one."""
    count, bad = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.tensor(RUN, device=DEVICE)
    for cond, uncond in predictions:
        call(history, cond, uncond if guided else None, steps, count, bad)
        count += 1
    return int(bad)


@pytest.mark.parametrize(
    ("case", "variant", "dtype"),
    covering(sizes(multistep), ["all", "no noise", "all channels", "no guidance"], turns=DTYPES, rest=gpu),
)
def test_multistep_gives_the_bits_of_plain_torch(case: dict[str, int], dtype: torch.dtype, variant: str) -> None:
    """After five steps every slot of the history has been written twice and read by another step."""
    got, predictions, steps = run_of(case, dtype)
    changes = {"no noise": {"noise_SnlC": None}, "all channels": {"guided": None}}
    steps, want = replace(steps, **changes.get(variant, {})), copied(got)
    assert play(multistep.launch, got, predictions, steps, variant != "no guidance") == RUN
    assert play(multistep.reference, want, predictions, steps, variant != "no guidance") == RUN
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))  # a slot may not be in use yet


@pytest.mark.parametrize("case", multistep.CASES[:5], ids=str)
def test_reference_is_the_recurrence(case: dict[str, int]) -> None:
    """The recurrence is computed in fp64, with all states and outputs kept in lists."""
    ring, predictions, steps = run_of(case)
    ring = History(*(None if x is None else x.double() for x in vars(ring).values()))  # pyright: ignore
    table, scales = steps.table_SK, steps.guidance_S.double()
    assert steps.noise_SnlC is not None
    steps = replace(steps, guidance_S=scales, noise_SnlC=steps.noise_SnlC.double())
    columns, states, guided = case["columns"], case["P"], steps.guided
    x, o = [ring.states_PnlC[0].clone()], []
    for i, (cond, uncond) in enumerate(predictions):
        cond, uncond = cond.double()[..., :columns], uncond.double()[..., :columns]
        mixed = uncond + scales[i] * (cond - uncond)
        o.append(torch.cat((mixed[..., :guided], cond[..., guided:]), -1))
        a, b = table[i, 1 : 1 + states], table[i, 1 + states :]
        new = sum(weight * x[i - j] for j, weight in enumerate(a) if j <= i)
        new = new + sum(weight * o[i - j] for j, weight in enumerate(b) if j <= i)
        x.append(new + draw(RUN, case["images"], case["tokens"], columns, seed=11).double()[i])
    assert play(multistep.guided_multistep, ring, [(c.double(), u.double()) for c, u in predictions], steps) == RUN
    assert float((ring.states_PnlC[RUN % states] - x[-1]).abs().max()) < 1e-11
    if ring.seen_nlC is not None:
        assert float((ring.seen_nlC - table[-1, 0] * x[-1]).abs().max()) < 1e-11


@pytest.mark.parametrize("call", [multistep.launch, multistep.reference])
def test_history_is_read_where_its_coefficient_is_not_zero(call: Call) -> None:
    """This is a negative control of the NaN in the tests above: with one more coefficient the first step is bad."""
    ring, predictions, steps = run_of(sizes(multistep)[1])
    for column in (2, 4):
        table = steps.table_SK.clone()
        table[0, column] = 0.5
        assert play(call, copied(ring), predictions, replace(steps, table_SK=table)) == 0


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("call", [multistep.launch, multistep.reference])
def test_the_first_bad_step_of_a_run_is_kept(value: float, call: Call) -> None:
    ring, predictions, steps = run_of(multistep.CASES[1])
    predictions[2][0][2, 84, 15] = value
    assert play(call, ring, predictions, steps) == 2


@pytest.mark.parametrize("change", ["row", "scale", "swapped", "stale"])
def test_negative_controls_a_wrong_step_is_noticed(change: str) -> None:
    """The mistakes are the next row's coefficients, the next step's guidance, swapped branches, and lost outputs."""
    ring, predictions, steps = run_of(sizes(multistep)[1])
    want = copied(ring)
    play(multistep.launch, want, predictions, steps)
    if change == "row":
        steps = replace(steps, table_SK=torch.cat((steps.table_SK[:1], steps.table_SK[:-1])))
    elif change == "scale":
        steps = replace(steps, guidance_S=steps.guidance_S.roll(1))
    elif change == "swapped":
        predictions = [(uncond, cond) for cond, uncond in predictions]
    call = multistep.launch if change != "stale" else lambda kept, *rest: multistep.launch(forgetful(kept), *rest)
    play(call, ring, predictions, steps)
    assert float((ring.states_PnlC[1] - want.states_PnlC[1]).abs().max()) > 0.05


def forgetful(kept: History) -> History:
    """Return the same history with the outputs from before the first step."""
    assert kept.outputs_QnlC is not None
    return replace(kept, outputs_QnlC=torch.zeros_like(kept.outputs_QnlC))


def test_what_multistep_cannot_take_is_refused() -> None:
    ring, predictions, steps = run_of(multistep.CASES[1])
    (cond, uncond), step = predictions[0], torch.zeros((), dtype=torch.int64, device=DEVICE)
    turned = replace(ring, states_PnlC=ring.states_PnlC.transpose(1, 2))
    with pytest.raises(ValueError, match=r"contiguous torch\.float64"):
        multistep.launch(turned, cond, uncond, steps, step, step.clone())
    with pytest.raises(ValueError, match="16 contiguous columns"):
        multistep.launch(ring, cond[..., :8], uncond, steps, step, step.clone())
    with pytest.raises(ValueError, match=r"expected 1 \+ 2 \+ 2 columns"):
        multistep.launch(
            ring, cond, uncond, replace(steps, table_SK=steps.table_SK[:, :4].contiguous()), step, step.clone()
        )
