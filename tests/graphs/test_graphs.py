"""Tests of graphs of calls, with a capture that runs on the CPU: what is copied, shared, captured again and dropped."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.graphs.graphs import CudaCapture, Graphs
from seqpar.graphs.signature import form_of
from seqpar.mesh.mesh import Mesh
from seqpar.transformer import parallelize as adapter
from seqpar.transformer.call import ShardedCall
from tests.support.calls import Captures, Recorder, Toy, recorded_call
from tests.support.diffusers_tiny import MODELS, Inputs, Tiny, moved
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import TRANSPORTS, mesh_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.one_file import DELAYED, added
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.transformer.test_pipelines import CASES, TOLERANCE, true_picture


def made(limit: int = 8) -> tuple[Recorder, Captures, Graphs]:
    recorder, captures = Recorder(Toy(), Mesh.single()), Captures()
    return recorder, captures, Graphs(Mesh.single(), captures, recorder.check, limit)


def arguments(seed: int, tokens: int = 5, **others: Any) -> dict[str, Any]:
    return {"hidden_states": random((2, tokens, 4), seed), "timestep": random((2,), seed + 1), **others}


def run(graphs: Graphs, body: Recorder, given: dict[str, Any], generation: int = 0) -> Tensor:
    (out,) = graphs.run(body.compute, form_of(given), generation).whole
    assert torch.equal(out, Toy()(**given, return_dict=False)[0])
    return out


def test_the_second_call_of_a_kind_is_captured_and_later_ones_are_replays() -> None:
    body, captures, graphs = made()
    for seed, replays in ((1, None), (2, 1), (3, 2)):
        run(graphs, body, arguments(seed))
        assert [each.replays for each in captures.made] == ([] if replays is None else [replays])
    assert body.checks == 1  # only the eager call may wait for the device


def test_inputs_and_results_are_the_callers_own() -> None:
    body, _, graphs = made()
    given = [arguments(seed) for seed in range(4)]
    copies = [{name: x.clone() for name, x in one.items()} for one in given]
    outs = [run(graphs, body, one) for one in given]
    kept = [out.clone() for out in outs]
    outs[2].fill_(torch.nan)
    run(graphs, body, arguments(9))
    for one, copy in zip(given, copies, strict=True):
        assert all(torch.equal(one[name], copy[name]) for name in one)
    assert all(torch.equal(outs[i], kept[i]) for i in (0, 1, 3))


def test_replays_of_two_kinds_alternate() -> None:
    body, captures, graphs = made()
    for seed in range(8):
        run(graphs, body, arguments(seed, tokens=5 + seed % 2))
    assert [each.replays for each in captures.made] == [3, 3]


def test_values_that_are_no_tensors_are_part_of_the_kind() -> None:
    body, captures, graphs = made()
    values: list[Any] = [{"a": 2}, {"a": 2.0}, {"a": True}, {"a": {"scale": 2.0}}, {"b": 2}, None]
    for value in values * 3:
        run(graphs, body, arguments(1, attention_kwargs=value))
    assert len(captures.made) == len(values)
    shapes = [[(1, 2), (3, 4)], [(1, 2), (3, 5)], [[1, 2], [3, 4]]]
    for shape in shapes * 2:
        run(graphs, body, arguments(1, img_shapes=shape))
    assert len(captures.made) == min(8, len(values)) + len(shapes)


def test_a_value_that_cannot_be_compared_is_never_captured() -> None:
    body, captures, graphs = made()
    for _ in range(3):
        run(graphs, body, arguments(1, attention_kwargs={"cache": torch.tensor(2.0)}) | {"img_shapes": None})
        graphs.run(body.compute, form_of(arguments(1) | {"attention_kwargs": Odd()}), 0)
    assert len(captures.made) == 1


class Odd:
    """An object that only its address tells from others."""

    def values(self) -> list[float]:
        return []


def test_a_change_of_state_is_captured_again() -> None:
    body, captures, graphs = made()
    for generation in (0, 0, 0, 1, 1):
        run(graphs, body, arguments(1), generation)
    assert [(each.replays, each.released) for each in captures.made] == [(2, True), (2, False)]
    assert captures.warm_ups == [0, 1]  # the first had just run as it is captured, the second had not


def test_a_call_that_failed_is_none_that_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have built its exchanges, so the capture of the next one runs it before."""
    body, captures, graphs = made()

    def fail(self: Any, **given: Any) -> None:
        raise ValueError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "forward", fail)
        with pytest.raises(ValueError, match="refused"):
            graphs.run(body.compute, form_of(arguments(1)), 0)
    run(graphs, body, arguments(1))
    assert captures.warm_ups == [1]


def test_ranks_wait_longer_for_each_call_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(Mesh, "call", lambda self, axis, what, is_first: seen.append(is_first) or nullcontext())
    body, _, graphs = made()
    for generation in (0, 0, 0, 0, 0, 1):
        run(graphs, body, arguments(1), generation)
    assert seen == [True, True, True, True, False, True]


def test_the_graph_used_longest_ago_makes_room() -> None:
    body, captures, graphs = made(limit=2)
    for tokens in (5, 5, 6, 6, 5, 7, 7):  # 6 was used longest ago when 7 is captured
        run(graphs, body, arguments(1, tokens))
    assert [each.released for each in captures.made] == [False, True, False]
    assert len(graphs) == 2
    graphs.release()
    assert all(each.released for each in captures.made)
    run(graphs, body, arguments(1))
    assert len(captures.made) == 3


def failing(rank: int, world: int, device: torch.device, which: int) -> list[int]:
    """Return how many captures and body calls there were, where capture fails on one rank."""
    module, captures = Toy(), Captures(fails=rank == which)
    body = Recorder(module, make_mesh(device, cfg=1))
    graphs = Graphs(make_mesh(device, cfg=1), captures, body.check)
    for seed in range(4):
        run(graphs, body, arguments(seed))
    return [len(captures.made), sum(each.released for each in captures.made), len(graphs)]


def test_where_one_rank_cannot_capture_all_run_eagerly_and_one_says_why(
    ranks: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ranks.run(3, failing, 1) == [[1, 1, 0], [0, 0, 0], [1, 1, 0]]
    capfd.readouterr()
    assert failing(0, 1, torch.device("cpu"), 0) == [0, 0, 0]
    printed = capfd.readouterr().out
    assert printed.count("\n") == 1
    assert "capture failed, running eagerly: operation not permitted when stream is capturing" in printed


def one_changes(rank: int, world: int, device: torch.device) -> list[int]:
    """Return the numbers of captures, where the address of a weight changes on one rank only."""
    captures = Captures()
    (call, body), counts = recorded_call(make_mesh(device, cfg=1), captures), []
    for step in range(6):
        body.key_ = rank if step >= 3 else 0
        call(**arguments(step))
        counts.append(len(captures.made))
    return counts


def test_all_ranks_capture_again_where_one_must(ranks: Pool) -> None:
    assert ranks.run(3, one_changes) == [[0, 1, 1, 2, 2, 2]] * 3


def guided(rank: int, world: int, device: torch.device) -> int:
    """Return the number of captures of conditional and unconditional calls of one shape."""
    module, captures = Toy(), Captures()
    call, _ = recorded_call(make_mesh(device, cfg=2) if world > 1 else Mesh.single(device), captures)
    for step in range(5):
        given = moved(arguments(step), device)
        branches = [{**given, "timestep": given["timestep"] + i} for i in (0, 1)]
        results = [call(**branch, return_dict=False)[0] for branch in branches]
        for got, branch in zip(results, branches, strict=True):
            assert torch.equal(got + 0, module(**branch, return_dict=False)[0])
    return len(captures.made)


@pytest.mark.parametrize("world", [1, 2])
def test_both_branches_share_a_graph(ranks: Pool, world: int) -> None:
    assert ranks.run(world, guided) == [1] * world


def test_calls_with_an_argument_that_is_read_run_eagerly_and_others_stay_graphs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    captures, counts = Captures(), []
    call, recorder = recorded_call(Mesh.single(), captures)
    recorder.cuts = replace(recorder.cuts, eager_with={"txt_ids": "it reads them"})
    for step in range(8):
        given = {**arguments(step), "txt_ids": torch.ones(2, 2) if step % 2 else None}
        call(**given)
        counts.append(len(captures.made))
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1]
    assert sum(each.replays for each in captures.made) == 3
    assert capsys.readouterr().out.count("calls with txt_ids run without CUDA graphs, because it reads them") == 1


def captured_pipeline(rank: int, world: int, device: torch.device, name: str, cfg: int) -> tuple[Tensor, int]:
    """Return this rank's pictures, computed by replays, and the number of replays."""
    captures, pipe = Captures(), CASES[name].pipe()
    seqpar.parallelize(pipe, make_mesh(device, cfg=cfg))
    call = pipe.transformer.forward
    in_double(pipe.transformer).graphs = Graphs(call.mesh, captures, call.check_delivered)
    CASES[name].pictures(pipe, rank + 5)
    return CASES[name].pictures(pipe, rank), sum(each.replays for each in captures.made)


@pytest.mark.parametrize(("name", "world", "cfg"), [("flux, true guidance", 4, 2), ("sd3", 2, 1)])
def test_replays_of_a_split_transformer_make_diffusers_picture(ranks: Pool, name: str, world: int, cfg: int) -> None:
    truth = true_picture(name, ranks.device)
    for pictures, replays in ranks.run(world, captured_pipeline, name, cfg):
        assert (pictures - truth).abs().max() < TOLERANCE
        assert replays >= 3


def alternating(
    rank: int, world: int, device: torch.device, strategy: str, transport: str
) -> tuple[list[Tensor], list[int]]:
    """Return the results of texts of 7, 5, 7, 5 ... tokens, and how often each capture was replayed."""
    captures, tiny = Captures(), MODELS["flux"]
    with added("transports"):
        mesh = mesh_for(strategy, world, device)
        module = seqpar.parallelize(tiny.build(), mesh, strategy=strategy, transport=transport, native=False)
        call: Any = module.forward
        in_double(module).graphs = Graphs(mesh, captures, call.check_delivered)
        results = [module(**shortened(tiny, step, device), return_dict=False)[0] for step in range(6)]
        seqpar.release(module)
    return results, [each.replays for each in captures.made]


def shortened(tiny: Tiny, step: int, device: torch.device | str) -> Inputs:
    """Return arguments whose text has 7 or 5 tokens, each step with another timestep."""
    given = tiny.arguments(device)
    text = {name: given[name][..., : 7 - 2 * (step % 2), :] for name in ("encoder_hidden_states", "txt_ids")}
    return {**given, **text, "timestep": given["timestep"] + 0.05 * step}


@cache
def wholes(device: str) -> list[Tensor]:
    """Return the results of the whole transformer for the calls of `alternating`, in host memory."""
    tiny = MODELS["flux"]
    module = tiny.build().to(device)
    return [tiny.whole(module, shortened(tiny, step, device))[0].cpu() for step in range(6)]


@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [
        *covering([pytest.param(2, "ulysses"), pytest.param(3, "kv_gather"), pytest.param(4, "usp")], turns=TRANSPORTS),
        (4, "usp", "peer"),
        (3, "kv_gather", DELAYED),
    ],
)
def test_replays_alternate_with_late_ranks(ranks: Pool, transport: str, world: int, strategy: str) -> None:
    expected = wholes(ranks.device)
    for results, replays in ranks.run(world, alternating, strategy, transport):
        assert replays == [2, 2]
        assert all((got - wanted).abs().max() < 1e-12 for got, wanted in zip(results, expected, strict=True))


def on_gpus(rank: int, world: int, device: torch.device) -> list[Tensor]:
    """Return the results of eager calls and of replays, of two kinds of calls that alternate."""
    tiny = MODELS["flux"]
    module = tiny.build().to(device)
    seqpar.parallelize(module, make_mesh(device, cfg=1), local="reference")
    with StayDouble():
        calls = (shortened(tiny, step, device) for step in (0, 1, 0, 1, 0, 1))
        results = [module(**given, return_dict=False)[0] for given in calls]
    call: Any = module.forward
    assert isinstance(call.graphs._capture, CudaCapture)
    assert len(call.graphs) == 2
    call.check_delivered()
    seqpar.release(module)
    assert not isinstance(module.forward, ShardedCall)
    assert adapter.transformers_of(module) == {"transformer": module}
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_gpu_replays_equal_eager_calls(ranks: Pool, world: int) -> None:
    for results in ranks.run(world, on_gpus):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(results[:4], results[2:], strict=True))
        assert (results[0] - results[1]).abs().max() > 1e-3
