"""Tests that parts of a pipeline folder that do not fit their files are refused before diffusers reads them.

diffusers and transformers wait for a pipe, build as many layers as a config says, and give weights that a file lacks
random values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqpar.loading.errors import naming
from seqpar.loading.folder import check_parts
from seqpar.loading.names import BUILTIN
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines import diffusers as adapted
from seqpar.pipelines.order import Order
from tests.support import pipelines


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a pipeline without a loop of ours."""
    folder = tmp_path_factory.mktemp("pixart")
    pipelines.pixart().save_pretrained(folder)
    return folder


def test_no_program_beside_a_part_runs(pixart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where diffusers is left alone: programs named in model_index.json, of a part's folder or the working one."""
    canary = tmp_path / "canary"
    program = f"open({str(canary)!r}, 'w')\n"
    (tmp_path / "mymodel").mkdir()
    for file in ("mymodel/__init__.py", "mymodel/evil.py", "canary.py"):
        (tmp_path / file).write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    for library in ("mymodel.evil", "mymodel", "canary"):
        with changed(pixart / "model_index.json", more=[library, "E"]), pytest.raises(ValueError, match="more="):
            check(pixart)
    adapter, beside = pixart / "transformer" / "adapter_config.json", pixart / "transformer" / "diffusers.py"
    adapter.write_text("{}")
    with pytest.raises(ValueError, match="expected no adapter"):
        check(pixart)
    adapter.unlink()
    beside.write_text(program)
    with pytest.raises(ValueError, match=r"which does not load: .*trust_remote_code"):
        check(pixart).pipeline(Mesh.single())
    beside.unlink()
    with changed(pixart / "model_index.json", tokenizer=["transformers", "AutoTokenizer"]):
        check(pixart)
        asks = changed(pixart / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]})
        with asks, pytest.raises(ValueError, match="with auto_map, expected a class of transformers"):
            check(pixart)
    with changed(pixart / "model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"]):
        check(pixart)
    assert not canary.exists()


@contextmanager
def changed(path: Path, **fields: object) -> Iterator[None]:
    """Let fields of a JSON file have these values inside a block."""
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | fields))
    try:
        yield
    finally:
        path.write_text(before)


def check(folder: Path) -> adapted.Adapted:
    return adapted.check(Order(str(folder), torch.float32, prompts=("a cat",)), folder)


PARTS = [
    ("text_encoder/config.json", {"num_layers": 3}, r"num_layers=3, expected 2, as model\.safetensors has"),
    ("text_encoder/config.json", {"num_layers": 10**12}, r"num_layers=1000000000000, expected at most 4096"),
    ("text_encoder/config.json", {"d_model": -(10**12)}, r"d_model=-1000000000000, expected at most"),
    ("text_encoder/config.json", {"d_kv": 1 << 20}, r"describes [\d,]+ parameters, expected the [\d,]+ of its"),
    ("text_encoder/config.json", {"d_model": 1 << 20, "vocab_size": 1 << 24}, r"config.json, which describes no T5Enc"),
    ("transformer/config.json", {"sample_size": 1 << 20}, r"a tensor of [\d,]+ elements, expected at most 268,435"),
    ("transformer/config.json", {"num_layers": 10**12}, r"num_layers=1000000000000, expected at most 4096"),
    ("transformer/config.json", {"num_layers": 4096}, r"more than [\d,]+ weights, about twice as many as its files"),
    ("transformer/config.json", {"num_layers": 3}, r"wrong keys\. Missing transformer_blocks\.2\."),
    ("transformer/config.json", {"cross_attention_dim": 8}, r"of shape \(40, 40\), expected \(40, 8\) as config\.json"),
    (
        "transformer/config.json",
        {"attention_head_dim": "x"},
        r"config\.json, which describes no PixArtTransformer2DMod",
    ),
    ("transformer/config.json", {"activation_fn": "x"}, r"config\.json, which describes no PixArtTransformer2DModel"),
    ("vae/config.json", {"scaling_factor": 0}, r"scaling_factor=0, expected float > 0"),
    ("vae/config.json", {"scaling_factor": None}, r"scaling_factor=None, expected float > 0"),
    ("vae/config.json", {"layers_per_block": 10**12}, r"layers_per_block=1000000000000, expected int <= 64"),
    ("vae/config.json", {"out_channels": 4}, r"out_channels=4, expected int <= 3"),
    ("vae/config.json", {"up_block_types": ["UpDecoderBlock2D"]}, r"wrong keys|describes no AutoencoderKL"),
    ("scheduler/scheduler_config.json", {"solver_order": 10**12}, r"solver_order=1000000000000, expected at most 4096"),
    ("scheduler/scheduler_config.json", {"beta_schedule": "x"}, r"scheduler, which describes no \w+: x is not impl"),
    (
        "model_index.json",
        {"text_encoder": ["a"]},
        r"text_encoder=list \['a'\], expected \[library, class\] or \[null, null\]",
    ),
    ("model_index.json", {"_class_name": ["PixArtAlphaPipeline"]}, r"expected the name of a pipeline's class"),
    *(
        (
            "model_index.json",
            {"safety_checker": [library, "E"]},
            rf"safety_checker=\[{library}, E\], expected classes of",
        )
        for library in ("canary", "canary.evil", "diffusers.pipelines.canary", "os", "transformers.models.canary")
    ),
    ("text_encoder/config.json", {"_attn_implementation": "owner/repo"}, r"='owner/repo', expected no kernel of a hub"),
    ("text_encoder/config.json", {"attn_implementation": {"": "a/b@main"}}, "expected no kernel of a hub"),
    ("text_encoder/config.json", {"text_config": {"_attn_implementation": "a/b"}}, "expected no kernel of a hub"),
    ("text_encoder/config.json", {"quantization_config": {"quant_method": "gguf"}}, "expected plain weights, whose"),
    ("transformer/config.json", {"quantization_config": {}}, "quantization_config, expected plain weights"),
    ("vae/config.json", {"quantization_config": {}}, "load the pipeline yourself and call seqpar.parallelize"),
]


def test_a_part_that_does_not_fit_its_files_is_refused(pixart: Path) -> None:
    assert check(pixart).load.images == 1  # negative control
    for file, fields, message in PARTS:
        with changed(pixart / file, **fields), pytest.raises(ValueError, match=message):
            check(pixart)
    index = pixart / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"got both diffusion_pytorch_model\.safetensors and its index"):
        check(pixart)  # diffusers would load the other one than was checked
    index.unlink()
    check(pixart)


def test_whole_numbers_in_the_place_of_a_weight_are_refused(tmp_path: Path) -> None:
    pipelines.wan().save_pretrained(tmp_path)
    (file,) = (tmp_path / "transformer").glob("*.safetensors")
    state = load_file(file)
    save_file(state | {"proj_out.weight": state["proj_out.weight"].to(torch.int8)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"got proj_out\.weight of type int8, expected floating-point weights"):
        check_parts(tmp_path, json.loads((tmp_path / "model_index.json").read_text()))


def test_a_table_of_positions_takes_no_memory_before_it_is_refused(tmp_path: Path) -> None:
    pipelines.wan().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    check_parts(tmp_path, index)  # a negative control
    with (
        changed(tmp_path / "transformer" / "config.json", rope_max_seq_len=10**9),
        pytest.raises(ValueError, match=r"WanTransformer3DModel: a tensor of 1,000,000,000 elements, expected at most"),
    ):
        check_parts(tmp_path, index)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (KeyError("x"), False),
        (RuntimeError("sizes must match"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (torch.OutOfMemoryError("x"), True),
        (OSError(28, "No space left on device"), True),
        (TimeoutError("rank 0 waited in vain for rank 1"), True),
    ],
    ids=repr,
)
def test_what_the_machine_is_to_blame_for_is_no_mistake_in_a_file(error: Exception, kept: bool) -> None:
    with pytest.raises(type(error) if kept else ValueError) as found, naming("got a file"):
        raise error
    assert (found.value is error) == kept
    assert kept or str(found.value).startswith("got a file: ")


def test_files_that_hold_no_weights_for_us_do_not_refuse_a_pipeline(pixart: Path) -> None:
    """Some published tokenizers have a config.json, and some folders halved weights beside pickled ones."""
    (pixart / "tokenizer" / "config.json").write_text("{}")
    encoder = pixart / "text_encoder"
    state = load_file(encoder / "model.safetensors")
    torch.save(state, encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").rename(encoder / "model.fp16.safetensors")
    check(pixart)
    (encoder / "model.fp16.safetensors").rename(encoder / "model.safetensors")
    (encoder / "pytorch_model.bin").unlink()
    (pixart / "tokenizer" / "config.json").unlink()


SCHEDULERS = [
    ({"steps_offset": 5000}, "fails in its step"),
    ({"trained_betas": [0.1, 0.2]}, "fails in its step|cannot do"),
    ({"trained_betas": 5}, "which cannot be built|fails in its step"),
    ({"num_train_timesteps": 10**12}, r"num_train_timesteps=1000000000000, expected at most 100000"),
    ({"beta_end": "x"}, "which cannot be built"),
    ({"beta_schedule": "x"}, "which cannot be built"),
    ({"beta_start": None}, r"which cannot be built: linspace\(\) received .{,400}$"),  # torch lists all it takes
    ({"prediction_type": None}, "fails in its step|prediction_type"),
    ({"_class_name": ["DDIMScheduler"]}, r"_class_name=list \['DDIMScheduler'\], expected a class"),
]
INDICES = [
    ({"id2label": 5}, "id2label=5, expected object"),
    ({"id2label": {"x": "cat"}}, "id2label=dict {'x': 'cat'}, expected str matching regex"),
    ({"id2label": {"0": 5}}, "id2label=dict {'0': 5}, expected str, got int"),
    ({"vae": 1.5}, r"vae=1\.5, expected \[library, class\]"),
]


def test_any_field_of_schedulers_and_indices_is_checked(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(BUILTIN, tmp_path / "copy"))
    class_labels.Files.locate(copy).schedule(None, 4)  # negative control
    for fields, message in SCHEDULERS:
        with changed(copy / "scheduler" / "scheduler_config.json", **fields), pytest.raises(ValueError, match=message):
            class_labels.Files.locate(copy).schedule(None, 4)
    for fields, message in INDICES:
        with changed(copy / "model_index.json", **fields), pytest.raises(ValueError, match=message):
            class_labels.Files.locate(copy)


def test_a_flux_folder_without_its_transformer_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="got a FluxPipeline without a transformer, expected a pipeline that has one"):
        check(tmp_path)
