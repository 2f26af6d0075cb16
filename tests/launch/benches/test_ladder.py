"""Tests of the ladder bench: rungs equal the plain model in fp64, and the compiled way is what users would compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.baselines.plain import predict
from launch.baselines.rungs import RUNGS, Inputs, Rung, forward
from launch.benches import ladder, table, timing
from seqpar.engine.distributed import DistributedDiT
from seqpar.local import sdpa
from seqpar.mesh import Mesh
from seqpar.models import large_dit
from seqpar.models._label_dit import LabelDiT
from seqpar.sampling.run import Run
from seqpar.weights.find import from_diffusers, locate
from tests.models.test_large_dit import VARIANTS, inputs
from tests.models.test_large_dit import ours as ours_large
from tests.models.test_large_dit import plain as plain_large
from tests.support.tiny import diffusers_dit, original_state_dict, with_original_arithmetic

CLOSE = 1e-10
CPU = torch.device("cpu")
TINY = large_dit.Config(64, 2, 4, 4, 48, num_classes=10, sample_size=8)


def pair(kind: str) -> tuple[nn.Module, LabelDiT]:
    """Return a plain model and ours with its weights, in fp64."""
    if kind in VARIANTS:
        return plain_large(VARIANTS[kind]), ours_large(VARIANTS[kind], CPU)
    theirs = diffusers_dit(attention_bias=kind != "dit without bias", learned_sigma=kind != "dit without sigma")
    model = from_diffusers(theirs).build(torch.float64, CPU)
    assert isinstance(model, LabelDiT)
    return theirs, model


def predicted(model: LabelDiT, rung: Rung, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    height, width = x.shape[2:]
    made = model.modulate(t, class_labels=y)
    given = Inputs(model.patchify(x), model.positions(height, width), t, y, made)
    return model.unpatchify(forward(model, rung, given, sdpa.attend), height, width)


@pytest.mark.parametrize("kind", [*VARIANTS, "dit", "dit without bias", "dit without sigma"])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_is_the_plain_model(rung: Rung, kind: str) -> None:
    """The latent does not have the trained size; diffusers' model supports square latents only."""
    x, t, y = inputs((6, 10) if kind in VARIANTS else (12, 12))
    plain, model = pair(kind)
    truth = predict(plain, x, t, y)
    assert (predicted(model, rung, x, t, y) - truth).abs().max() < CLOSE * truth.abs().max()


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_of_the_original_dit_is_the_plain_model(rung: Rung, tmp_path: Any) -> None:
    """The original DiT, which presets use, has another sinusoid and epsilon than diffusers' DiT."""
    theirs = with_original_arithmetic(diffusers_dit(num_attention_heads=1, attention_head_dim=64))
    torch.save({"ema": original_state_dict(theirs)}, tmp_path / "dit.pt")
    model = locate(tmp_path / "dit.pt", heads=1).build(torch.float64, CPU)
    assert isinstance(model, LabelDiT)
    x, t, y = inputs((8, 8))
    truth = predict(theirs, x, t, y)
    assert (predicted(model, rung, x, t, y) - truth).abs().max() < CLOSE * truth.abs().max()


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_negative_control_a_rung_of_other_weights_is_noticed(rung: Rung) -> None:
    x, t, y = inputs((8, 8))
    plain, model = pair("dit")
    truth = predict(plain, x, t, y)
    model.blocks[1].get_submodule("fc1").bias += 1e-3  # pyright: ignore[reportOperatorIssue]
    assert (predicted(model, rung, x, t, y) - truth).abs().max() > 1e-6 * truth.abs().max()


@pytest.mark.parametrize("name", ["large", "dit-s/8"])
def test_each_rung_has_the_steps_of_the_plain_one(name: str) -> None:
    """The bench's own steps change the same state with the same weights by the same amount."""
    config = TINY if name == "large" else locate(name).config
    kind = large_dit if name == "large" else locate(name).module
    torch.manual_seed(0)
    model = kind.Model(replace(config, num_layers=2)).double().requires_grad_(False)
    moves = {rung: step() for rung, step in ladder.rungs(model, 16, "sdpa").items()}
    first = moves[RUNGS[0].name]
    assert list(moves) == [rung.name for rung in RUNGS]
    assert all((move - first).abs().max() < CLOSE * first.abs().max() for move in moves.values())  # pyright: ignore


class Compiler:
    """A torch.compile backend that records the graphs it gets and runs them unchanged."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, given: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def is_complex(node: Any) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.is_complex()


@pytest.mark.parametrize("name", ["large", "dit"])
def test_what_is_compiled_is_one_graph_in_real_numbers_compiled_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls in and outside inference mode, as the bench and its capture make them, compile once and without a break."""
    config = TINY if name == "large" else replace(locate("dit-s/8").config, num_layers=2)
    kind = large_dit if name == "large" else locate("dit-s/8").module
    torch.manual_seed(0)
    step = ladder.plain_step(kind.Model(config).double().requires_grad_(False), 16)
    compiler, compile_ = Compiler(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: compile_(f, dynamic=dynamic, backend=compiler))
    torch._dynamo.reset()
    faster = ladder.compiled_step(step)
    outs = [faster()]
    with torch.inference_mode():
        outs.append(faster())
    outs.append(faster())
    truth = torch.inference_mode()(step)()
    assert all((out - truth).abs().max() < 1e-12 for out in outs)
    assert len(compiler.graphs) == 1
    assert not any(is_complex(node) for node in compiler.graphs[0].graph.nodes)
    torch._dynamo.reset()


class Still:
    """Stands for the GPU sensors on a machine that has none."""

    def __enter__(self) -> Still:
        return self

    def __exit__(self, *error: object) -> None: ...

    def medians(self) -> tuple[float, float]:
        return 1500.0, 700.0


def test_the_ladder_has_a_line_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the whole bench on a CPU, with a clock that counts calls in place of graphs, events and sensors."""
    calls: list[object] = []

    def clock(work: Callable[[], object], repeat: int = 1) -> float:
        calls.append(work())
        return 2.0

    for module, names in ((ladder, ("timed", "walled")), (timing, ("timed",))):
        for name in names:
            monkeypatch.setattr(module, name, clock)
    monkeypatch.setattr(ladder, "graphed", lambda work: work)
    monkeypatch.setattr(ladder, "compiled_step", lambda step: step)
    monkeypatch.setattr(ladder, "Sensors", Still)
    monkeypatch.setattr(Run, "capture", lambda run: None)
    lines = ladder.measure(ladder.Ladder("dit-s/8", (16,), rounds=2, runs=2), 16, CPU)
    ways = [line["case"]["way"] for line in lines]
    ours = ["engine: kernels, eager", ladder.ENGINE]
    assert ways == [*(rung.name for rung in RUNGS), *ours, *ladder.PLAIN, "ceiling"]
    assert {line["case"]["way"] for line in lines if "run_ms" in line} == {*ladder.PLAIN, ladder.ENGINE}
    assert all(line["ms"]["median"] == line["run_ms"]["mean"] == 2.0 for line in lines if "run_ms" in line)
    (engine,) = (line for line in lines if "joules" in line)
    assert (engine["case"]["way"], engine["joules"]) == (ladder.ENGINE, pytest.approx(1.4))
    assert len(calls) == 1 + 2 * len(ways) + 1 + 2 * 5
    assert len(table.tables(lines)) == 2
    assert all(ladder.row(line) for line in lines)


def line(way: str, ms: float, run_ms: float | None, ceiling: float = 1.0) -> dict[str, Any]:
    case = {"model": "m", "tokens": 256, "way": way}
    made = {"bench": "ladder", "case": case, "ms": {"median": ms, "min": ms, "max": ms}, "tflops": 1.0}
    return made | {"ceiling_ms": ceiling} | ({} if run_ms is None else {"run_ms": {"mean": run_ms}})


def test_runs_are_compared_with_the_plain_ways_of_the_same_run() -> None:
    lines = [line("plain eager", 8.0, 200.0), line("+ fused adaLN", 6.0, None), line("engine", 2.0, 100.0)]
    other = [line("plain eager", 80.0, 2000.0, 2.0)]
    _, made = table.tables(lines + other)
    assert made.splitlines()[2:] == [
        "| m | 256 | plain eager | 8.00 | 1.00 |  |  |  | 200 | 1.00 |  |  |  |",
        "| m | 256 | + fused adaLN | 6.00 | 1.33 |  |  |  |  |  |  |  |  |",
        "| m | 256 | engine | 2.00 | 4.00 |  |  |  | 100 | 2.00 |  |  |  |",
        "| m | 256 | plain eager | 80.00 | 1.00 |  |  |  | 2000 | 1.00 |  |  |  |",
    ]
    assert len(table.tables([line("plain eager", 8.0, None)])) == 1


def test_a_step_that_is_timed_again_and_again_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step restarts its run: with random weights the state would grow until it overflows, and then run faster."""
    made: list[Any] = []
    real = ladder.begin
    monkeypatch.setattr(ladder, "begin", lambda *args: made.append(real(*args)) or made[0])
    dit = DistributedDiT(locate("dit-s/8").build(torch.float32, torch.device("cpu")), Mesh.single())
    step = ladder.engine(dit, 16, False)
    states = []
    for _ in range(3):
        for _ in range(ladder.RUN_STEPS):
            step()
        states.append(made[0].tokens.clone())
    assert states[0].isfinite().all()
    assert torch.equal(states[0], states[2])
