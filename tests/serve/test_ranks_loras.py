"""Tests of LoRAs by request: ranks of the built-in model of texts, beside the command with the same files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from seqpar.loading.names import LORAS
from seqpar.serve.messages import Failed, ImageRequest, ImageResult
from seqpar.serve.ranks.loop import SOCKET
from tests.cli.loras import write
from tests.cli.processes import seqpar
from tests.serve.test_ranks import FROG, named, picture
from tests.support import pipelines
from tests.support.driver import Driver, replica
from tests.support.meshes import random

pytestmark = [pytest.mark.slow, pytest.mark.whole]
SETS = {"none": (), "one": (("outline", 1.0),), "weak": (("outline", 0.5),), "two": (("other", 0.7), ("outline", 1.0))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two LoRAs: the package's, and one that changes half of its layers in another way."""
    made = tmp_path_factory.mktemp("loras")
    shutil.copy(LORAS["outline"], made / "outline.safetensors")
    tensors = load_file(LORAS["outline"])
    paths = sorted({key.partition(".lora_")[0] for key in tensors})[::2]
    mine = {key: x for key, x in sorted(tensors.items()) if key.partition(".lora_")[0] in paths}
    other = {key: 0.1 * random(tuple(x.shape), seed).float() for seed, (key, x) in enumerate(mine.items())}
    save_file(other, made / "other.safetensors")
    return made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Driver]:
    """Return two ranks with both built-in models and the LoRAs, which have made two sizes before they were ready."""
    words = ("builtin", "builtin-text", "--loras", str(folder), "--warm", "auto", "48x64")
    with replica(tmp_path_factory.mktemp("serve"), 2, *words) as made:
        yield made
        assert made.finish() == 0


def test_sizes_are_made_before_the_ranks_are_ready(driver: Driver) -> None:
    told = driver.errors.with_name("output").read_text().splitlines()
    warm = [line.partition(" after")[0] for line in told if "is warm for" in line]
    assert warm == [
        f"seqpar: {name} is warm for {size}" for name in ("builtin", "builtin-text") for size in ("auto", "48x64")
    ]
    assert sum("previews of" in line for line in told) == 2
    assert not driver.steps
    assert not driver.partial


def asked(driver: Driver, name: str, id_: str) -> ImageResult:
    """Return the answer to an order with a set of LoRAs."""
    answer = driver.ask(named(FROG, id_, loras=SETS[name]))
    assert isinstance(answer, ImageResult), answer
    return answer


def test_pictures_have_the_bits_of_the_commands_whatever_was_merged_before(
    driver: Driver, folder: Path, tmp_path: Path
) -> None:
    order = ("none", "two", "one", "one", "none", "weak", "two", "none")
    every = [(name, asked(driver, name, f"{index}")) for index, name in enumerate(order)]
    pictures = {name: picture(answer) for name, answer in every}
    assert all(np.array_equal(picture(answer), pictures[name]) for name, answer in every)
    assert ["lora" in answer.parts_s for _, answer in every] == [False, True, True, False, True, True, True, True]
    assert all(not np.array_equal(pictures[a], pictures[b]) for a in SETS for b in SETS if a != b)
    file = tmp_path / "two.png"
    loras = [f"{folder / lora}.safetensors:{scale}" for lora, scale in SETS["two"]]
    words = ["--prompt", FROG.prompt, "--seed", "3", "--steps", "6", "--ranks", "2", "--out", file]
    done = seqpar("sample", *words, "--lora", *loras)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(pictures["two"], np.asarray(Image.open(file)))


def test_who_has_which_loras(driver: Driver) -> None:
    classes, texts = driver.ready.models
    assert (classes.loras, texts.loras) == ((), ("other", "outline"))
    unknown = driver.ask(named(FROG, "unknown", loras=(("../outline", 1.0),)))
    assert isinstance(unknown, Failed)
    assert unknown.why == "mistake"
    assert "got the LoRA ../outline, expected one of other, outline" in unknown.text
    of_classes = driver.ask(named(FROG, "classes", model="builtin", prompt="cat", loras=SETS["one"]))
    assert isinstance(of_classes, Failed)
    assert "model builtin has no LoRAs" in of_classes.text


def test_a_switch_reaches_weights_that_lie_in_one_matrix(tmp_path: Path) -> None:
    """FLUX.1's fused blocks make views of q, k and v in the first call, after the LoRAs were found."""
    folder, loras = tmp_path / "flux", tmp_path / "loras"
    pipelines.flux().save_pretrained(folder)
    loras.mkdir()
    file = write(loras / "style.safetensors", "flux", ("to_q", "to_out.0", "proj_mlp", "add_k_proj", "x_embedder"), 1)
    order = ImageRequest("", str(folder), "a red cat", seed=3, steps=2, size=(16, 16))
    with replica(tmp_path, 2, str(folder), "--loras", str(loras)) as driver:
        sets = ((), (("style", 1.0),), ())
        plain, styled, again = (
            picture(driver.ask(named(order, f"{index}", loras=each))) for index, each in enumerate(sets)
        )
        assert driver.finish() == 0
    words = ["--model", folder, "--prompt", "a red cat", "--seed", 3, "--steps", 2, "--size", "16x16", "--ranks", 2]
    for mine, flags in ((plain, ()), (styled, ("--lora", file))):
        done = seqpar("sample", *words, *flags, "--out", tmp_path / "x.png")
        assert done.returncode == 0, done.stderr
        assert np.array_equal(mine, np.asarray(Image.open(tmp_path / "x.png")))
    assert np.array_equal(plain, again)
    assert not np.array_equal(plain, styled)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (("auto", "64x50"), "no served model takes --warm 64x50: got size 50x64"),
        (("big",), "--warm big is no size; use WIDTHxHEIGHT in pixels, such as 1024x768, or auto"),
    ],
)
def test_a_size_that_is_none_ends_the_start(monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, ...], told: str) -> None:
    monkeypatch.setenv(SOCKET, "/nowhere")
    done = seqpar("replica", "builtin-text", "--warm", *sizes, "--ranks", 1)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize("kind", ["empty", "name", "misfit"])
def test_a_folder_that_does_not_fit_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(SOCKET, "/nowhere")
    if kind == "name":
        shutil.copy(LORAS["outline"], tmp_path / "-odd.safetensors")
    if kind == "misfit":
        save_file({"transformer.nothing.lora_A.weight": torch.ones(2, 4)}, tmp_path / "misfit.safetensors")
    done = seqpar("replica", "builtin-text", "--loras", tmp_path, "--ranks", 1)
    told = {"empty": "has no files NAME.safetensors", "name": "LoRA '-odd'"}
    assert done.returncode == 2
    assert told.get(kind, "LoRA misfit fits no served model") in done.stderr
