"""The built-in models: flags that name a prompt mean the one of texts, others the one of classes.

A tiny FLUX.1 stands in for the files of the model of texts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from seqpar.cli.args import Args
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.loading import names
from tests.cli.test_prompts import pixels, refused
from tests.cli.test_sample import parameters


@pytest.fixture
def text_model(monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]) -> None:
    monkeypatch.setitem(names.NAMES, "builtin-text", folders("flux"))


@pytest.mark.usefixtures("no_gpu", "text_model")
@pytest.mark.parametrize(
    ("words", "head"),
    [
        (["--prompt", "a red cat"], "builtin-text: 1 picture(s) of 16 tokens, guidance 3.5 as an input"),
        (["--model", "builtin-text", "--prompt", "a", "b"], "builtin-text: 2 picture(s) of 16 tokens, guidance 3.5"),
        (["--classes", "cat", "rocket"], "builtin: 2 picture(s) of "),
        ([], "builtin: 12 picture(s) of "),
    ],
    ids=str,
)
def test_a_plan_names_the_model_that_the_flags_mean(
    capsys: pytest.CaptureFixture[str], words: list[str], head: str
) -> None:
    """The size of a picture of a text is that of the decoder, 16 pixels, 4 tokens, along a side."""
    command(["plan", "--gpus", "2", *words])
    assert capsys.readouterr().out.startswith(head)


@pytest.mark.usefixtures("no_gpu", "text_model")
def test_a_prompt_alone_is_drawn_by_the_model_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Args(prompt=("a red cat",), steps=1, out=tmp_path / "x.png"))
    assert capsys.readouterr().out.count("\nmodel     builtin-text\n") == 1
    assert pixels(tmp_path / "x.png").shape == (16, 16, 3)
    told = parameters(tmp_path / "x.png")
    assert (told["model"], told["chosen"]["size"]) == ("builtin-text", "16x16")


@pytest.mark.usefixtures("no_gpu", "text_model")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("builtin", "--prompt a with --model builtin: this model generates images of classes"),
        ("builtin-text", "--classes 7 with --model builtin-text: FluxPipeline takes prompts"),
    ],
)
def test_classes_and_a_prompt_are_refused_together(tmp_path: Path, model: str, message: str) -> None:
    flags = {"classes": ("7",), "prompt": ("a",), "size": None}
    assert refused(Path(model), tmp_path / "x.png", flags).startswith(message)


def test_names_of_built_in_models_need_no_files() -> None:
    assert names.resolve("builtin") == names.BUILTIN
    assert names.resolve("builtin-text") == names.BUILTIN.with_name("emoji-flux")
