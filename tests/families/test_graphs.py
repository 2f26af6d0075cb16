"""Tests that a call of every family can be a CUDA graph, or that its reason why not is one.

On a device whose host is watched (`tests/support/device.py`) the second call of each model of
`tests/support/diffusers_tiny.py` is captured: what a graph cannot hold, such as a value that is read or a table that is
copied, ends the capture. It runs on one rank, by diffusers' own blocks: exchanges and kernels have GPU tests.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from seqpar.families._cuts import Cuts
from seqpar.families._find import CUTS
from seqpar.families._prove import TOLERANCE
from seqpar.graphs.graphs import Graphs
from tests.support.device import DEVICE, Device, device
from tests.support.diffusers_tiny import MODELS, Inputs, flat, truth
from tests.support.foreign import StayDouble
from tests.support.sharded import Outputs, body_of, error

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi asks for fp32
NAMES = [name for name in MODELS if not name.startswith("ltx2")]
# whose pipeline passes positions, which the transformer's own forward would copy from the host
PLACED = [name for name in MODELS if name.startswith("ltx2")]
ROUNDS = ("mochi",)  # mixes dtypes under autocast, which knows no such device


def run(
    here: Device, name: str, given: Inputs, cuts: Cuts | None = None, **config: Any
) -> tuple[Outputs, int, str | None]:
    """Return the results of a replay on the device, the number of graphs, and the reason against them."""
    with torch.no_grad(), nullcontext() if name in ROUNDS else StayDouble():
        body: Any = body_of(here.take(MODELS[name].having(**config).build()), 1, DEVICE, cuts=cuts)
        body.graphs = Graphs(body.mesh, here.capture, body.check_delivered)
        *_, outputs = [body(**here.moved(given), return_dict=False) for _ in ("eager", "captured", "replayed")]
        graphs, reason = len(body.graphs), body.sharded.why_eager()
        body.release()
    tensors: tuple[Any, ...] = flat(outputs)
    return tuple(x.host for x in tensors), graphs, reason


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_captured_unless_its_family_has_a_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with device() as here:
        outputs, graphs, reason = run(here, name, MODELS[name].arguments())
    assert graphs == (reason is None), capsys.readouterr().out
    assert error(outputs, truth(name, "cpu")) < TOLERANCE


@pytest.mark.parametrize("name", PLACED)
def test_a_call_with_the_positions_of_its_pipeline_is_captured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, module = MODELS[name].arguments(), MODELS[name].build()
    sizes = [given[key] for key in ("num_frames", "height", "width")]
    video = module.rope.prepare_video_coords(len(given["hidden_states"]), *sizes, device="cpu")
    sound = module.audio_rope.prepare_audio_coords(len(video), given["audio_num_frames"], device="cpu")
    with device() as here:
        outputs, graphs, _ = run(here, name, given | {"video_coords": video, "audio_coords": sound})
    assert graphs, capsys.readouterr().out
    assert error(outputs, truth(name, "cpu")) < TOLERANCE


def test_a_call_without_actions_of_a_model_that_has_them_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    given, config = MODELS["cosmos3omni"].arguments(), {"action_gen": True, "action_dim": 5}
    wanted = MODELS["cosmos3omni"].having(**config).whole(None, given)
    with device() as here:
        outputs, graphs, reason = run(here, "cosmos3omni", given, **config)
    assert (graphs, reason) == (1, None), capsys.readouterr().out
    assert error(outputs, wanted) < TOLERANCE


def without(kind: str, **changes: Any) -> Cuts:
    """Return a family's cuts whose places do nothing about what a forward makes on the host."""
    places = {
        path: replace(place, on_device=False, constants=(), numbers=()) for path, place in CUTS[kind].places.items()
    }
    return replace(CUTS[kind], places=places, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cogview4", {}, "a copy of (1, 1, 15, 40) between host and device"),
        ("easyanimate", {}, "a copy of (1, 1, 45, 16) between host and device"),
        ("kandinsky5", {}, "a copy of (24,) between host and device"),
        ("hunyuanimage", {"forward": lambda module: None}, "an index of bools waits for values"),
        ("glmimage", {"forward": lambda module: None}, "an index of bools waits for values"),
        ("chroma", {}, "a copy of (2, 4) between host and device"),
    ],
)
def test_negative_control_diffusers_own_ways_end_a_capture(
    name: str, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with device() as here:
        outputs, graphs, reason = run(here, name, MODELS[name].arguments(), without(MODELS[name].kind, **changes))
    assert (graphs, reason) == (0, None)
    assert f"CUDA graph capture failed, running eagerly: operation not permitted when stream is capturing: {words}" in (
        capsys.readouterr().out
    )
    assert error(outputs, truth(name, "cpu")) < TOLERANCE


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: x.sum().item(), "the host reads values"),
        (lambda x: x.tolist(), "the host reads values"),
        (lambda x: 1 if (x > 0).all() else 0, "the host reads values"),
        (lambda x: int(x[0]), "the host reads values"),
        (lambda x: x[x > 0], "an index of bools waits for values"),
        (lambda x: x.masked_select(x > 0), "masked_select waits for values"),
        (lambda x: x.nonzero(), "nonzero waits for values"),
        (lambda x: x.repeat_interleave((x > 0).long()), "repeat_interleave waits for values"),
        (lambda x: x.cpu(), "a copy of (3,) between host and device"),
        (lambda x: x + torch.arange(3).to(x.device), "a copy of (3,) between host and device"),
        (lambda x: x + torch.tensor([1, 2, 3], device=x.device), "a copy of (3,) between host and device"),
        (lambda x: x + x.new_tensor([1, 2, 3]), "a copy of (3,) between host and device"),
        (lambda x: x[torch.tensor([0, 1])], "an index on the host is copied"),
    ],
)
def test_negative_control_what_waits_for_the_host_is_seen(work: Any, words: str) -> None:
    with device() as here, torch.no_grad():
        x = here.moved(torch.tensor([1.0, -2.0, 3.0]))
        work(x)  # as in a warm-up
        with pytest.raises(RuntimeError) as caught:
            here.capture(lambda: work(x), 0)
    assert words in str(caught.value)


def test_what_a_graph_can_hold_is_captured() -> None:
    with device() as here, torch.no_grad():
        x = here.moved(torch.tensor([1.0, -2.0, 3.0]))
        made = here.capture(
            lambda: (torch.arange(3, device=x.device) + torch.where(x > 0, x, 0.0) * torch.tensor(2),), 0
        )
        made.replay()
    assert made.results[0].host.tolist() == [2.0, 1.0, 8.0]


def test_operations_on_tensors_of_both_sides_are_errors() -> None:
    with device() as here, torch.no_grad(), pytest.raises(RuntimeError, match="expected all tensors on one device"):
        here.moved(torch.ones(3)).add(torch.ones(3))
