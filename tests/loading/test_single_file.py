"""Tests that transformers in the keys of their authors load as diffusers' own, by diffusers' converters."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_model
from safetensors.torch import save_file
from torch import Tensor

from seqpar.cli.main import command
from seqpar.loading.checkpoint import open_checkpoint
from seqpar.loading.folder import check_single
from seqpar.loading.single_file import as_diffusers
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source
from seqpar.pipelines.find import find
from seqpar.pipelines.protocol import GenerationRequest
from tests.support import pipelines, single_files

SMALL: dict[str, Any] = {
    **{"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": (16, 56, 56), "guidance_embeds": True},
    **{"in_channels": 16, "num_layers": 2, "num_single_layers": 2},
    **{"joint_attention_dim": pipelines.WIDTH, "pooled_projection_dim": pipelines.WIDTH},
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tiny FLUX.1 with heads as the released ones have them, which diffusers' converter can convert."""
    entry = {"checkpoint_mapping_fn": single_files.converter_of_width(128), "default_subfolder": "transformer"}
    monkeypatch.setitem(single_file_model.SINGLE_FILE_LOADABLE_CLASSES, "FluxTransformer2DModel", entry)
    return pipelines.random_weights(pipelines.THEIRS.FluxTransformer2DModel(**SMALL), 3)


FORMS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "the authors'": dict,
    "ComfyUI's": single_files.prefixed,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_flux_in_its_authors_keys_is_diffusers(tmp_path: Path, narrow: Any, form: str) -> None:
    """No config lies beside the file: the shapes tell all sizes. Every parameter is that of diffusers' model."""
    save_file(FORMS[form](single_files.flux(narrow)), tmp_path / "flux1-dev.safetensors")
    fitted = check_single(tmp_path / "flux1-dev.safetensors")
    checkpoint, config = fitted.checkpoint, fitted.config
    assert {key: value for key, value in config.items() if key != "_class_name"} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in narrow.config.items() if key in config
    } | {"out_channels": config["in_channels"]}
    theirs = narrow.state_dict()
    assert checkpoint.shapes.keys() == theirs.keys()
    assert all(torch.equal(checkpoint.tensor(key), theirs[key]) for key in theirs)


def scaled(state: Mapping[str, Tensor], form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a file's tensors in 8 bits as ComfyUI saves them, and the weights that they stand for."""
    by_row, saved, meant = form == "a scale a row", dict[str, Tensor](), dict[str, Tensor]()
    for key, x in state.items():
        saved[key] = meant[key] = x.float()
        if key.endswith(".weight") and x.dim() == 2:
            scale = (x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()).float() / 448
            saved[key] = (x / scale).to(torch.float8_e4m3fn)
            meant[key] = saved[key].float() * scale
            saved[key.removesuffix("weight") + ("weight_scale" if by_row else "scale_weight")] = scale
            saved[key.removesuffix("weight") + ("input_scale" if by_row else "scale_input")] = torch.ones(())
    saved["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    return saved, meant


@pytest.mark.parametrize("form", ["a scale a weight", "a scale a row"])
def test_weights_in_8_bits_of_comfyui_are_their_products(tmp_path: Path, narrow: Any, form: str) -> None:
    saved, meant = scaled(single_files.flux(narrow), form)
    save_file(single_files.prefixed(saved), tmp_path / "scaled.safetensors")
    save_file(single_files.prefixed(meant), tmp_path / "meant.safetensors")
    got, wanted = (check_single(tmp_path / f"{name}.safetensors") for name in ("scaled", "meant"))
    assert got.config == wanted.config
    assert got.checkpoint.shapes == wanted.checkpoint.shapes
    for key in wanted.checkpoint.shapes:
        assert torch.equal(got.checkpoint.tensor(key), wanted.checkpoint.tensor(key)), key
    assert not torch.equal(got.checkpoint.tensor("proj_out.weight"), narrow.proj_out.weight.float())


def sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)


def test_the_released_flux_is_known_by_its_shapes(tmp_path: Path) -> None:
    """diffusers' own converter, at the width for which it is written; no weight is read."""
    layers: Any = {"num_layers": 3, "num_single_layers": 2}
    with torch.device("meta"):
        model = pipelines.THEIRS.FluxTransformer2DModel(guidance_embeds=True, **layers)
        sparse(tmp_path / "dev.safetensors", {key: tuple(x.shape) for key, x in single_files.flux(model).items()})
    fitted = check_single(tmp_path / "dev.safetensors")
    checkpoint, config = fitted.checkpoint, fitted.config
    assert {**config, **layers} == {**config, "guidance_embeds": True}
    assert checkpoint.shapes == {key: tuple(x.shape) for key, x in model.state_dict().items()}


def folder_of(tmp_path: Path, pipe: Any, state: Mapping[str, Tensor]) -> Path:
    """Return the authors' file in the folder of its pipeline, whose transformer has a config and no weights."""
    pipe.save_pretrained(tmp_path)
    for weights in (tmp_path / "transformer").glob("*.safetensors"):
        weights.unlink()
    save_file(dict(state), tmp_path / "single.safetensors")
    return tmp_path / "single.safetensors"


@pytest.mark.parametrize(
    ("name", "form"), [("flux", "the authors'"), ("sd3", "ComfyUI's"), ("wan", "the authors'"), ("wan", "ComfyUI's")]
)
def test_models_load_from_one_file_with_the_parts_of_a_folder(
    tmp_path: Path, narrow: Any, name: str, form: str
) -> None:
    """As Black Forest Labs' repository has it: the file beside model_index.json, text encoders and decoder."""
    pipe = getattr(pipelines, name)()
    if name == "flux":
        pipe.transformer = narrow
    file = folder_of(tmp_path, pipe, FORMS[form](getattr(single_files, name)(pipe.transformer)))
    if name == "flux":  # whose config follows from its shapes
        shutil.rmtree(tmp_path / "transformer")
    source = find(str(file))
    assert isinstance(source, Source)
    assert source.parts.fitted["transformer"].path == file
    job = source.check(GenerationRequest(str(file), torch.float64, prompts=("a cat",)))
    loaded, truth = job.load_pipeline(Mesh.single()).transformer.state_dict(), pipe.transformer.state_dict()
    converted = as_diffusers(open_checkpoint(file), file)
    assert converted is not None
    assert converted[0].shapes.keys() == truth.keys()
    for key, tensor in truth.items():
        assert torch.equal(loaded[key], tensor)
        assert torch.equal(converted[0].tensor(key), tensor)


def test_converting_writes_the_folder_of_diffusers(tmp_path: Path, narrow: Any) -> None:
    file, new = tmp_path / "flux.safetensors", tmp_path / "new"
    save_file(single_files.prefixed(single_files.flux(narrow)), file)
    command(["convert", str(file), str(new)])
    again = pipelines.THEIRS.FluxTransformer2DModel.from_pretrained(new, torch_dtype=torch.float64)
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, narrow.state_dict()[key])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"single_blocks.1.linear2.bias": None}, r"does not take these keys \(KeyError: .*linear2\.bias'\)"),
        ({"txt_in.weight": None}, r"flux\.safetensors: got a checkpoint that lacks txt_in\.weight"),
        ({"lora.down": torch.ones(2)}, r"wrong keys\. Unknown 1 to a FluxTransformer2DModel: lora\.down"),
        ({"double_blocks.0.img_attn.norm.query_norm.scale": torch.ones(64)}, "heads 64 wide; released ones have 128"),
        ({"img_in.weight": torch.ones(128, 16).to(torch.float8_e4m3fn)}, "of type float8_e4m3fn, expected floating-p"),
        ({"img_in.scale_weight": torch.ones(())}, "img_in.weight is float64 with a scale of shape"),
        ({"none.scale_weight": torch.ones(())}, "none.scale_weight is a scale without its weight"),
        ({"txt_in.weight": torch.ones(128, 8, 2)}, r"txt_in\.weight of shape \(128, 8, 2\), expected 2 dims"),
    ],
)
def test_a_flux_that_cannot_be_converted_is_refused(
    tmp_path: Path, narrow: Any, change: Mapping[str, Tensor | None], message: str
) -> None:
    state = {key: x for key, x in {**single_files.flux(narrow), **change}.items() if x is not None}
    save_file(state, tmp_path / "flux.safetensors")
    with pytest.raises(ValueError, match=message):
        check_single(tmp_path / "flux.safetensors")


def test_a_file_says_what_belongs_beside_it(tmp_path: Path, narrow: Any) -> None:
    save_file(single_files.flux(narrow), tmp_path / "flux.safetensors")
    with pytest.raises(ValueError, match=r"put it into the folder of its pipeline, beside model_index\.json with"):
        command(["sample", "--model", str(tmp_path / "flux.safetensors"), "--prompt", "a"])
    save_file(single_files.wan(pipelines.wan().transformer), tmp_path / "wan.safetensors")
    with pytest.raises(
        ValueError, match=r"keys like .*Put it into the folder of its pipeline.*seqpar convert .*FOLDER"
    ):
        command(["sample", "--model", str(tmp_path / "wan.safetensors"), "--prompt", "a"])


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    pipe = pipelines.sd3()
    state = single_files.sd3(pipe.transformer)
    file = folder_of(tmp_path, pipe, state | {"x_embedder.proj.bias": torch.ones(7)})
    with pytest.raises(ValueError, match=r"pos_embed\.proj\.bias of shape \(7,\), expected \(40,\) as config\.json"):
        find(str(file))
