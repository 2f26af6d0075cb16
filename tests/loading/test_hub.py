"""A name that may be a hub id is asked for once, in one line, and not at all where the hub's switch says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import checked
from seqpar.loading import names as hub
from seqpar.loading.names import resolve
from seqpar.loop.blueprint import locate
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.find import find
from tests.support.pool import Pool

Asked = Callable[[BaseException | None], list[Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A hub that answers with an error, or knows every name; and the questions that it was asked."""

    def answers(error: BaseException | None) -> list[Any]:
        questions = list[Any]()

        def model_info(self: object, name: str, timeout: float) -> None:
            questions.append((name, timeout))
            if error is not None:
                raise error

        def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
            if local_files_only and name != "owner/kept":
                raise LocalEntryNotFoundError("many\nlines\nof the hub")
            questions.append(name)
            return "/there"

        monkeypatch.setattr(hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        return questions

    return answers


def test_a_name_is_asked_for_once_with_a_short_time_out(asked: Asked) -> None:
    for error in (ConnectionError("no route\nand more"), TimeoutError("slow"), None):
        questions = asked(error)
        if error is None:
            assert hub.download("owner/new", ["dit"]) == Path("/there")
        else:
            with pytest.raises(ValueError, match=r"^got model 'owner/new': the hub gave no answer.* no such path$"):
                hub.download("owner/new", ["dit"])
        assert questions[0] == ("owner/new", hub.ASK_S)
        assert len(questions) == (1 if error is not None else 2)
        assert hub.download("owner/kept", ["dit"]) == Path("/there")  # from the cache, without a network


def test_a_controlnet_is_a_path_or_downloaded(asked: Asked, tmp_path: Path) -> None:
    questions = asked(None)
    assert hub.controlnet_of("owner/new") == Path("/there")
    assert questions == [("owner/new", hub.ASK_S), "owner/new"]
    assert hub.controlnet_of(str(tmp_path)) == tmp_path
    assert len(questions) == 2
    asked(ConnectionError("no route"))
    with pytest.raises(ValueError, match=r"^got ControlNet 'owner/new': the hub gave no answer"):
        hub.controlnet_of("owner/new")


def test_the_hubs_switch_leaves_it_unasked(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = asked(None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE says not to ask the hub"):
        hub.download("owner/new", ["dit"])
    assert hub.download("owner/kept", ["dit"]) == Path("/there")
    assert questions == ["owner/kept"]


FLUX = "black-forest-labs/FLUX.1-dev"
MEANT = {  # names that do not exist: what follows "did you mean"
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev or random:FLUX.1-dev (random weights)",
    "flux.1-dev": "black-forest-labs/FLUX.1-dev or random:FLUX.1-dev (random weights)",
    "random:flux.1-dev": "black-forest-labs/FLUX.1-dev or random:FLUX.1-dev (random weights)",
    "unidiffuser-v1": "thu-ml/unidiffuser-v1 or random:unidiffuser-v1 (random weights)",
    "qwen-image": "Qwen/Qwen-Image",
    "DiT-S/8": "dit-s/8 (random weights)",
    "Large-DiT-3B": "large-dit-3b (random weights)",
    "Builtin": "builtin",
}


def test_names_that_cannot_be_hub_ids_are_not_asked_for_and_near_ones_are_suggested(asked: Asked) -> None:
    questions = asked(ConnectionError("no route"))
    for name in ("../x", "a/b/c", "nothing-there", ".hidden/x", "x" * 10**5):
        with pytest.raises(
            ValueError, match=r"there is no such path; known models: .*; with random weights: dit$"
        ) as error:
            hub.download(name, ["dit"])
        assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match=r"^got model 'x+\.\.\.': there is no such path"):
        resolve("x" * 300)  # longer than a name of a file may be
    for name, meant in MEANT.items():  # no random model stands in for another name
        with pytest.raises(ValueError, match="did you mean") as error:
            find(name)
        assert str(error.value) == f"got model {name!r}, which does not exist: did you mean {meant}?"
    for name, near in (
        ("bultin", "builtin"),
        ("Builtin_Text", "builtin-text"),
        ("dit-xl2", "dit-xl/2"),
        ("FLUX.1-dve", FLUX),
        ("z-image", "Tongyi-MAI/Z-Image-Turbo"),
        ("sd3.5-large", "stabilityai/stable-diffusion-3.5-large"),
        ("sd3.5", "stabilityai/stable-diffusion-3.5-large or stabilityai/stable-diffusion-3.5-medium"),
    ):
        with pytest.raises(ValueError, match=rf"there is no such path; did you mean {near}\?$"):
            resolve(name)
    assert not questions
    with pytest.raises(ValueError, match=r"there is no such path$"):  # which may be an id
        resolve("dit/xl")


def test_a_path_and_a_random_model_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dit-s/8", "random:dit-s/8", "random:FLUX.1-dev"):
        assert resolve(name) is None  # random models; a negative control
    Path("dit-s/8").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"dit-s/8 is a model with random weights and a .*; write random:dit-s/8 or \./dit-s/8$"
    ):
        resolve("dit-s/8")
    assert resolve("random:dit-s/8") is None
    assert resolve("./dit-s/8") == Path("dit-s/8")
    with pytest.raises(ValueError, match=r"got random:FLUX\.1-dev, a pipeline of diffusers"):
        locate("random:FLUX.1-dev")


def told(rank: int, world: int, device: torch.device, log: str) -> str:
    """The error of a model that the hub does not know; each question is a line of the log."""

    def model_info(self: object, name: str, timeout: float) -> None:
        with open(log, "a") as file:
            file.write(f"{name}\n")
        raise ConnectionError("no route")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.HfApi, "model_info", model_info)
        try:
            checked(Args(model="owner/none-of-this-name"), Mesh.joined(device))
        except ValueError as error:
            return str(error)
    return "nothing"


def test_ranks_together_ask_once(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks.run(2, told, str(tmp_path / "log"))
    assert one == other
    assert one.startswith("got model 'owner/none-of-this-name': the hub gave no answer (no route), ")
    assert (tmp_path / "log").read_text() == "owner/none-of-this-name\n"


@pytest.mark.parametrize(
    "name", ["dit.pt", "uvit_v1.pth", "vae.ckpt", "model.bin", "consolidated.00-of-01.safetensors"]
)
def test_formats_of_authors_are_rejected_with_the_command_that_converts_them(tmp_path: Path, name: str) -> None:
    """Before the file is opened: it is empty here."""
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / name
    file.touch()
    for path in (file, file.parent):
        for use in (resolve, locate, find, seqpar.load):
            with pytest.raises(ValueError, match=re.escape(f"run seqpar convert {path} FOLDER, then use FOLDER")):
                use(str(path))
    (file.parent / "config.json").touch()
    assert resolve(file.parent) == file.parent  # a negative control: diffusers' folders may have other files


def test_weights_of_paddle_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model_state.pdparams").touch()
    with pytest.raises(ValueError, match="in PaddlePaddle's format; use the model's diffusers"):
        resolve(tmp_path)
