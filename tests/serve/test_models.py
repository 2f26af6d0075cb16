"""The models of the ranks: loaded and unloaded at run time, and predicted before weights load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from seqpar.mesh.mesh import Mesh
from seqpar.planner.predict import GIB, predict
from seqpar.serve.messages import Changed, ImageRequest, ImageResult
from seqpar.serve.ranks.checked import CheckedModel
from seqpar.serve.ranks.models import LoadError, Models
from seqpar.serve.rules import fills, predicted_s, step_ratio, why_not
from tests.serve.test_ranks import CAT, FROG, failed, image
from tests.support.driver import replica


@pytest.mark.slow
@pytest.mark.whole
def test_models_change_on_all_ranks_or_stay(tmp_path: Path) -> None:
    """With the bits of a first load, and without files or threads that stay."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    flux = tmp_path / "flux"
    pipelines.flux().save_pretrained(flux)

    def loaded(answer: object) -> list[str]:
        assert isinstance(answer, Changed), answer
        return [model.name for model in answer.ready.models if model.loaded]

    def held() -> list[int]:
        return [len([*Path(f"/proc/{rank}/{kind}").iterdir()]) for rank in driver.ranks() for kind in ("fd", "task")]

    models = ("builtin", "builtin-text", str(flux), "--names", "builtin", "builtin-text", "named")
    with replica(tmp_path, 2, *models, "--most", "1", "--swaps") as driver:
        assert [model.loaded for model in driver.ready.models] == [True, False, False]
        failed(driver.ask(FROG), "mistake", "model builtin-text is not loaded; use one of builtin")
        first, counts = image(driver.ask(CAT)), list[list[int]]()
        for _ in range(3):
            assert loaded(driver.change("builtin-text")) == ["builtin-text"]
            assert isinstance(driver.ask(FROG), ImageResult)
            assert loaded(driver.change("builtin")) == ["builtin"]
            assert np.array_equal(image(driver.ask(CAT)), first)
            counts.append(held())
        assert all(new <= old + 2 for old, new in zip(counts[1], counts[-1], strict=True)), counts

        # a model whose files have changed does not load, and the one before still runs
        assert loaded(driver.change("named")) == ["named"]
        assert loaded(driver.change("builtin")) == ["builtin"]
        (weights,) = (flux / "transformer").glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-100])
        answer = driver.change("named")
        failed(answer, "failure", f"named/transformer/{weights.name}")
        assert str(flux) not in str(answer)
        assert np.array_equal(image(driver.ask(CAT)), first)
        failed(driver.change(unload=("none",)), "mistake", "model none is not known")

        # none at all
        assert loaded(driver.change(unload=("builtin",))) == []
        failed(driver.ask(CAT), "mistake", "is not loaded")
        assert loaded(driver.change("builtin")) == ["builtin"]
        assert np.array_equal(image(driver.ask(CAT)), first)
        assert driver.finish() == 0


@dataclass(frozen=True)
class Known:
    """What `Models` reads of a `CheckedModel`."""

    name: str
    memory: int = 1
    kept: int = 0
    room: float | None = None
    alone: float | None = None


def test_a_model_that_is_not_finite_does_not_stay_and_one_that_cannot_come_back_ends_the_ranks() -> None:
    broken = {"nan"}

    def warm(name: str) -> None:
        if name in broken:
            raise FloatingPointError("not finite")

    def load(model: Any, facts: object) -> Any:
        return SimpleNamespace(facts=model.name, close=lambda: None, limit=lambda *how: None)

    known: Any = [Known("good"), Known("nan")]
    models = Models(known, 9, 1, True, load)
    models.start(["good"], warm)
    with pytest.raises(LoadError, match="not finite"):
        models.change(["nan"], (), warm)
    assert models.use("good")
    broken.add("good")
    with pytest.raises(RuntimeError, match="the models before do not load again: not finite"):
        models.change(["nan"], (), warm)


@pytest.fixture(scope="module")
def classes() -> CheckedModel:
    return CheckedModel.of("builtin", torch.float32, Mesh.single(), {})


def test_seconds_are_predicted_with_the_guidance_of_a_request(classes: CheckedModel) -> None:
    """Of a model with two branches by default: the seconds of its load without guidance are those of one."""
    facts = classes.facts((64, 64))
    assert (classes.example.load.images, classes.example.load.guidance) == (1, True)
    off = replace(classes.example.load, guidance=False)
    ranking = classes.plan.ranking
    expected = predict(ranking.work, off, classes.plan.layout, ranking.rates).ms / classes.plan.ms
    guided = {None: 1.0, 4.0: 1.0, 1.0: expected, 0.0: expected}
    ratios = {scale: step_ratio(facts, ImageRequest("", "builtin", "cat", guidance=scale)) for scale in guided}
    assert ratios == pytest.approx(guided, rel=0.1)  # the load also has its number of labels
    assert 0.3 < expected < 0.9

    # one branch ends before a deadline that two outlast
    limit_s = 1.3 * predicted_s(facts.loads, 64 * 64) * expected
    slow = msgspec.structs.replace(facts, loads=tuple((pixels, 1e6 * s) for pixels, s in facts.loads), limit=None)
    reasons = [
        why_not(slow, ImageRequest("", "builtin", "cat", guidance=scale, deadline_s=1e6 * limit_s)) for scale in guided
    ]
    assert [reason is None for reason in reasons] == [False, False, True, True]


def test_a_request_may_need_the_memory_of_the_models_beside_its_own(classes: CheckedModel) -> None:
    run = classes.memory / GIB
    facts = replace(classes, room=2 * run, alone=8 * run).facts((64, 64))
    assert facts.beside is not None
    assert facts.limit is not None
    assert facts.beside < facts.limit
    side = int((facts.beside * facts.limit) ** 0.25) // 8 * 8
    sizes = ((64, 64), (side, side), (4 * side, 4 * side))
    requests = [ImageRequest("", "builtin", "cat", size=size) for size in sizes]
    assert [fills(facts, request) for request in requests] == [False, True, True]
    assert [why_not(facts, request) is None for request in requests] == [True, True, False]
    assert replace(classes, room=2 * run).facts((64, 64)).limit == facts.beside  # of a server that swaps nothing


def test_a_second_branch_may_need_the_memory_of_the_models_beside(tmp_path: Path) -> None:
    """The ranks take a request without it, and one with it as soon as the others have left."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    pipelines.flux().save_pretrained(tmp_path)
    flux = CheckedModel.of(str(tmp_path), torch.float32, Mesh.single(), {})
    beside = replace(flux, room=2 * flux.memory / GIB, alone=8 * flux.memory / GIB)
    facts = beside.facts((64, 64))

    def requests(most: int | None) -> tuple[ImageRequest, ImageRequest]:
        """Plain and guided, of a size for which memory suffices without guidance only. most: its pixels."""
        side = int((0.7 * (most or 0)) ** 0.5) // facts.unit * facts.unit
        plain = ImageRequest("", flux.name, "a", size=(side, side))
        return plain, msgspec.structs.replace(plain, true_guidance=2.0, negative_prompt="a")

    plain, guided = requests(facts.beside)
    assert [fills(facts, request) for request in (plain, guided)] == [False, True]
    assert beside.job(plain, ()).load.guidance is False
    with pytest.raises(ValueError, match="GiB"):
        beside.job(guided, ())
    alone = replace(beside, room=beside.alone)
    assert alone.job(guided, ()).load.guidance
    # with more pixels it needs more than all memory, and is refused when it arrives
    plain, guided = requests(facts.limit)
    refusals = [why_not(facts, request) for request in (plain, guided)]
    assert [refusal and refusal.param for refusal in refusals] == [None, "size"]
    assert alone.job(plain, ()).load.guidance is False
    with pytest.raises(ValueError, match="GiB"):
        alone.job(guided, ())
