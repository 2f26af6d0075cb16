"""`--lora`: pictures against diffusers' own pipeline with the same files and scales, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.lora import Lora, load, parse
from seqpar.loop.blueprint import Blueprint
from tests.cli.processes import seqpar
from tests.cli.test_prompts import SAME, pixels, refused, shown
from tests.cli.test_sample import parameters
from tests.support import pipelines
from tests.support.meshes import random
from tests.support.pool import Pool

ROUNDED = 0.51 / 255  # of a picture in a file
SIDE = 16  # of a picture of the tiny FLUX.1 if nobody names a size: its decoder's sample_size


def adapted(model: Any, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """Add an adapter without zeros to a model, and return its tensors."""
    model.add_adapter(LoraConfig(r=2, target_modules=list(layers)), "made")
    for index, (key, weight) in enumerate(model.named_parameters()):
        if ".made." in key:
            weight.data = 0.3 * random(tuple(weight.shape), 100 * seed + index).float()
    return get_peft_model_state_dict(model, adapter_name="made")


def write(path: Path, kind: str, layers: Sequence[str], seed: int, encoder: bool = False) -> Path:
    """Write a LoRA of a tiny pipeline as diffusers does, and return its file; encoder: also for its text encoder."""
    pipe = getattr(pipelines, kind)()
    more = {"text_encoder_lora_layers": adapted(pipe.text_encoder, ("q_proj", "v_proj"), seed)} if encoder else {}
    type(pipe).save_lora_weights(path.parent, adapted(pipe.transformer, layers, seed), weight_name=path.name, **more)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return LoRAs: two of FLUX.1, one of another model, and damaged ones."""
    folder = tmp_path_factory.mktemp("lora")
    found = {
        "style": write(folder / "style.safetensors", "flux", ("to_q", "to_out.0", "proj_mlp"), 1, encoder=True),
        "other": write(folder / "other.safetensors", "flux", ("add_k_proj", "x_embedder"), 2),
        "sd3": write(folder / "sd3.safetensors", "sd3", ("to_q",), 3),
    }
    tensors = load_file(found["other"])
    key = next(iter(tensors))
    changes = {
        "unknown": {"transformer.nothing.lora_A.weight": torch.ones(2, 40)},
        "wide": {key: torch.ones(*tensors[key].shape[:-1], 48)},
        "elsewhere": {"unet.nothing.lora_A.weight": torch.ones(2, 40)},
    }
    for name, change in changes.items():
        found[name] = folder / f"{name}.safetensors"
        save_file({**tensors, **change}, found[name])
    found["cut"], found["bin"] = folder / "cut.safetensors", folder / "style.bin"
    found["cut"].write_bytes(found["style"].read_bytes()[:-9])
    found["bin"].write_bytes(b"")
    return found


def theirs(folder: Path, loras: dict[Path, float]) -> np.ndarray:
    """Return the picture that diffusers alone makes with these files and scales."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    pipe: Any = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float64)
    pipe.set_progress_bar_config(disable=True)
    for path in loras:
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
    if loras:
        pipe.set_adapters([path.stem for path in loras], list(loras.values()))
    sizes: dict[str, Any] = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, "output_type": "np"}
    return pipe("a red cat", generator=torch.Generator().manual_seed(3), **sizes).images[0]


@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")  # diffusers alone, with a second file
@pytest.mark.usefixtures("no_gpu")
def test_pictures_are_those_of_diffusers_with_the_same_files(
    ranks: Pool, folders: Callable[[str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    folder, style, other = folders("flux"), files["style"], files["other"]
    plain = Args(str(folder), prompt=("a red cat",), steps=2, seed=3, dtype="fp64", out=tmp_path / "x.png")
    both = replace(plain, lora=(f"{style}:0.5", str(other)))
    truth, *controls = (
        theirs(folder, loras) for loras in ({style: 0.5, other: 1.0}, {style: 0.5}, {style: 0.6, other: 1.0})
    )
    for world in (1, 2):
        (out, bars), *others = ranks.run(world, shown, both)
        assert f"lora      {style}:0.5\nlora      {other}:1\n" in out
        assert "2/2" in bars
        assert others == [("", "")] * (world - 1)
        picture = pixels(plain.out)
        assert picture.shape == (SIDE, SIDE, 3)
        assert abs(picture / 255 - truth).max() < ROUNDED
        assert parameters(plain.out)["lora"] == [f"{style}:0.5", str(other)]
        assert all(abs(picture / 255 - control).max() > 5 * ROUNDED for control in controls)


@pytest.mark.usefixtures("no_gpu")
def test_a_scale_of_zero_gives_the_picture_without_it(
    folders: Callable[[str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    plain = Args(str(folders("flux")), prompt=("a red cat",), steps=2, seed=3, dtype="fp32", out=tmp_path / "x.png")
    pictures = []
    for lora in ((), (f"{files['style']}:0",), (f"{files['style']}",)):
        run(replace(plain, lora=lora))
        pictures.append(pixels(plain.out))
    none, zero, one = pictures
    assert abs(zero - none).max() <= SAME
    assert abs(one - none).max() > 10 * SAME


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "lora", "flags", "message"),
    [
        ("flux", "nothing", {}, "got --lora nothing, expected a .safetensors file that exists"),
        ("flux", "bin", {}, "style.bin, expected a .safetensors file that exists"),
        ("flux", "cut", {}, "is truncated or not a safetensors file"),
        ("flux", "style:nan", {}, "expected a finite scale, such as 0.8"),
        ("flux", "style:much", {}, "style.safetensors:much, expected a .safetensors file that exists"),
        (
            "flux",
            "sd3",
            {},
            "which does not fit: expected each of its 6 keys in a FluxTransformer2DModel and no others",
        ),
        ("sd3", "other", {}, "which does not fit: expected each of its"),
        ("flux", "wide", {}, "which does not fit the FluxTransformer2DModel: "),
        ("flux", "unknown", {}, "with nothing.lora_A.weight, which does not fit"),
        (
            "flux",
            "elsewhere",
            {},
            "with the key unet.nothing.lora_A.weight, expected a LoRA of a FluxTransformer2DModel",
        ),
        ("pixart", "style", {}, "is not supported: diffusers' PixArtAlphaPipeline loads no LoRA of a transformer"),
        ("unidiffuser", "style", {}, "LoRAs need the folder of a diffusers pipeline for prompts"),
        ("flux", "style", {"size": "24x30"}, "got size 24x30, expected multiples of 4"),
        ("random:FLUX.1-dev", "style", {}, "LoRAs need the folder of a diffusers pipeline for prompts"),
        ("builtin", "style", {"prompt": ()}, "LoRAs need the folder of a diffusers pipeline for prompts"),
        (
            "large-dit-3b",
            "style",
            {"prompt": (), "dry_run": (2,)},
            "LoRAs need the folder of a diffusers pipeline for prompts",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_weights_load(
    folders: Callable[[str], Path],
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    lora: str,
    flags: dict[str, Any],
    message: str,
) -> None:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    folder = folders(name) if hasattr(pipelines, name) else Path(name)
    monkeypatch.setattr(Blueprint, "build", refuse)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)
    file, colon, scale = lora.partition(":")
    told = refused(
        folder, tmp_path / "x.png", {"prompt": ("a",), **flags, "lora": (f"{files.get(file, file)}{colon}{scale}",)}
    )
    assert message in told
    assert "\n" not in told
    assert not list(tmp_path.iterdir())


def test_negative_control_a_file_that_diffusers_leaves_out_is_noticed(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipelines.flux()
    load(pipe, [Lora(str(files["style"]))])
    for taken, missing in (("transformer", "text_encoder, of which"), ("text_encoder", "which does not fit")):
        left = pipelines.flux()
        monkeypatch.setattr(type(left), "load_lora_weights", lambda *_, **__: None)
        setattr(left, taken, getattr(pipe, taken))  # the other part is as it was before
        with pytest.raises(ValueError, match=missing):
            load(left, [Lora(str(files["style"]))])


def test_a_lora_of_another_model_ends_all_ranks_with_one_message(
    folders: Callable[[str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--model", folders("flux"), "--prompt", "a red cat", "--lora", files["sd3"], "--out", tmp_path / "x.png")
    done = seqpar("sample", "--ranks", 2, *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("got --lora") == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("a.safetensors", Lora("a.safetensors")),
        ("a.safetensors:0.5", Lora("a.safetensors", 0.5)),
        ("a:b.safetensors:-2", Lora("a:b.safetensors", -2.0)),
        ("C:\\styles\\a.safetensors", Lora("C:\\styles\\a.safetensors")),
        ("a.safetensors:", Lora("a.safetensors:")),
    ],
)
def test_the_last_colon_begins_a_scale_where_a_number_follows(text: str, lora: Lora) -> None:
    assert parse(text) == lora
