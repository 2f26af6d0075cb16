"""Tests of guidance and a linear scheduler's step in one kernel: it has the reference's bits with any history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.kernels.multistep import BLOCK, CASES, History, Steps, guided_multistep, launch, reference
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu
from tests.kernels.test_ddim import draw
from tests.support.pairs import covering

# on CPUs an image is a few elements larger than a block, because the interpreter needs milliseconds for each program
SMALL = [
    {**case, "tokens": min(case["tokens"], BLOCK // case["columns"] + 3)} for case in CASES if case["tokens"] <= 130
]
SIZES = [*SMALL, *(pytest.param(case, marks=gpu) for case in CASES)]
STEPS = 5
Call = Callable[..., None]


def data(case: dict[str, int], dtype: torch.dtype = torch.float32) -> tuple[History, list[tuple[Tensor, ...]], Steps]:
    """Return a history with NaN in unused slots, both predictions of every step, and steps that do not use NaN."""
    images, tokens, columns, width, states, outputs, _ = case.values()
    predictions = [tuple(draw(2 * images, tokens, width, seed=i).to(dtype).chunk(2)) for i in range(STEPS)]
    table = draw(STEPS, 1 + states + outputs, seed=10).double() / 2
    for step in range(STEPS):
        table[step, 1 + step + 1 : 1 + states] = 0.0
        table[step, 1 + states + step + 1 :] = 0.0
    noise, guidance = draw(STEPS, images, tokens, columns, seed=11), 1 + 3 * draw(STEPS, seed=12).abs()
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
    past, seen = history.outputs_QnlC, history.seen_nlC
    return History(
        history.states_PnlC.clone(), None if past is None else past.clone(), None if seen is None else seen.clone()
    )


def tensors(history: History) -> list[Tensor]:
    return [x for x in (history.states_PnlC, history.outputs_QnlC, history.seen_nlC) if x is not None]


def play(call: Call, history: History, predictions: list[tuple[Tensor, ...]], steps: Steps, guided: bool = True) -> int:
    """Take all steps, and return the first bad one."""
    count, bad = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.tensor(STEPS, device=DEVICE)
    for cond, uncond in predictions:
        call(history, cond, uncond if guided else None, steps, count, bad)
        count += 1
    return int(bad)


@pytest.mark.parametrize(
    ("case", "variant", "dtype"),
    covering(SIZES, ["all", "no noise", "all channels", "no guidance"], turns=DTYPES, rest=gpu),
)
def test_kernel_gives_the_bits_of_plain_torch(case: dict[str, int], dtype: torch.dtype, variant: str) -> None:
    """After five steps every slot of the history has been written twice and read by another step."""
    got, predictions, steps = data(case, dtype)
    changes = {"no noise": {"noise_SnlC": None}, "all channels": {"guided": None}}
    steps, want = replace(steps, **changes.get(variant, {})), copied(got)
    assert play(launch, got, predictions, steps, variant != "no guidance") == STEPS
    assert play(reference, want, predictions, steps, variant != "no guidance") == STEPS
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))  # a slot may not be in use yet


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_reference_is_the_recurrence(case: dict[str, int]) -> None:
    """The recurrence is computed in fp64, with all states and outputs kept in lists."""
    ring, predictions, steps = data(case)
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
        x.append(new + draw(STEPS, case["images"], case["tokens"], columns, seed=11).double()[i])
    assert play(guided_multistep, ring, [(c.double(), u.double()) for c, u in predictions], steps) == STEPS
    assert float((ring.states_PnlC[STEPS % states] - x[-1]).abs().max()) < 1e-11
    if ring.seen_nlC is not None:
        assert float((ring.seen_nlC - table[-1, 0] * x[-1]).abs().max()) < 1e-11


@pytest.mark.parametrize("call", [launch, reference])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
def test_history_is_read_where_its_coefficient_is_not_zero(call: Call) -> None:
    """This is a negative control of the NaN in the tests above: with one more coefficient the first step is bad."""
    ring, predictions, steps = data(SMALL[1])
    for column in (2, 4):
        table = steps.table_SK.clone()
        table[0, column] = 0.5
        assert play(call, copied(ring), predictions, replace(steps, table_SK=table)) == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", [launch, reference])
def test_the_first_bad_step_is_kept(value: float, call: Call) -> None:
    ring, predictions, steps = data(CASES[1])
    predictions[2][0][2, 84, 15] = value
    assert play(call, ring, predictions, steps) == 2


@pytest.mark.parametrize("change", ["row", "scale", "swapped", "stale"])
def test_negative_controls_a_wrong_step_is_noticed(change: str) -> None:
    """The mistakes are the next row's coefficients, the next step's guidance, swapped branches, and lost outputs."""
    ring, predictions, steps = data(SMALL[1])
    want = copied(ring)
    play(launch, want, predictions, steps)
    if change == "row":
        steps = replace(steps, table_SK=torch.cat((steps.table_SK[:1], steps.table_SK[:-1])))
    elif change == "scale":
        steps = replace(steps, guidance_S=steps.guidance_S.roll(1))
    elif change == "swapped":
        predictions = [(uncond, cond) for cond, uncond in predictions]
    call = launch if change != "stale" else lambda kept, *rest: launch(forgetful(kept), *rest)
    play(call, ring, predictions, steps)
    assert float((ring.states_PnlC[1] - want.states_PnlC[1]).abs().max()) > 0.05


def forgetful(kept: History) -> History:
    """Return the same history with the outputs from before the first step."""
    assert kept.outputs_QnlC is not None
    return replace(kept, outputs_QnlC=torch.zeros_like(kept.outputs_QnlC))


def test_what_the_kernel_cannot_take_is_refused() -> None:
    ring, predictions, steps = data(CASES[1])
    (cond, uncond), step = predictions[0], torch.zeros((), dtype=torch.int64, device=DEVICE)
    turned = replace(ring, states_PnlC=ring.states_PnlC.transpose(1, 2))
    with pytest.raises(ValueError, match=r"contiguous torch\.float64"):
        launch(turned, cond, uncond, steps, step, step.clone())
    with pytest.raises(ValueError, match="16 contiguous columns"):
        launch(ring, cond[..., :8], uncond, steps, step, step.clone())
    with pytest.raises(ValueError, match=r"expected 1 \+ 2 \+ 2 columns"):
        launch(ring, cond, uncond, replace(steps, table_SK=steps.table_SK[:, :4].contiguous()), step, step.clone())
