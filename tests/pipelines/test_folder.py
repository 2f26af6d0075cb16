"""Tests that parts of a pipeline folder that do not fit their files are refused before diffusers reads them.

diffusers and transformers wait for a pipe, build as many layers as a config says, and give weights that a file lacks
random values.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from seqpar.loading.errors import context
from seqpar.loading.folder import check_model
from seqpar.loading.names import BUILTIN
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines.diffusers import DiffusersJob, Source
from seqpar.pipelines.protocol import GenerationRequest
from tests.support import pipelines


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    with pytest.raises(ValueError, match="would change the weights"):
        check(pixart)
    adapter.unlink()
    beside.write_text(program)
    with pytest.raises(ValueError, match=r"which does not load: .*trust_remote_code"):
        check(pixart).load_pipeline(Mesh.single())
    beside.unlink()
    with changed(pixart / "model_index.json", tokenizer=["transformers", "AutoTokenizer"]):
        check(pixart)
        asks = changed(pixart / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]})
        with asks, pytest.raises(ValueError, match=r"names a program \(auto_map\), which is not run"):
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


def check(folder: Path) -> DiffusersJob:
    return Source.locate(folder).check(GenerationRequest(str(folder), torch.float32, prompts=("a cat",)))


ENCODER, TRANSFORMER, VAE, INDEX = (
    "text_encoder/config.json",
    "transformer/config.json",
    "vae/config.json",
    "model_index.json",
)
ODD = ("canary", "canary.evil", "diffusers.pipelines.canary", "os", "transformers.models.canary")
PARTS = [
    (ENCODER, {"num_layers": 3}, r"wrong keys\. Missing \d+: encoder\.block\.2\."),
    (ENCODER, {"num_layers": 10**12}, r"num_layers=1000000000000, but its file has only"),
    (ENCODER, {"d_model": -4}, r"does not fit a T5EncoderModel"),
    (ENCODER, {"d_kv": 1 << 20}, r"got encoder\.block\.0.* as config\.json says"),
    (ENCODER, {"_attn_implementation": "owner/repo"}, r"loads a kernel of a hub \(_attn_impl"),
    (ENCODER, {"attn_implementation": {"": "a/b@main"}}, "loads a kernel of a hub"),
    (ENCODER, {"text_config": {"_attn_implementation": "a/b"}}, "loads a kernel of a hub"),
    (ENCODER, {"quantization_config": {"quant_method": "gguf"}}, "quantized weights cannot be"),
    (TRANSFORMER, {"num_layers": 10**12}, r"num_layers=1000000000000, but its file has only"),
    (TRANSFORMER, {"num_layers": 3}, r"wrong keys\. Missing transformer_blocks\.2\."),
    (TRANSFORMER, {"cross_attention_dim": 8}, r"of shape \(40, 40\), expected \(40, 8\) as config\.json"),
    (TRANSFORMER, {"attention_head_dim": "x"}, r"config\.json, which describes no PixArtTransformer2DModel"),
    (TRANSFORMER, {"activation_fn": "x"}, r"config\.json, which describes no PixArtTransformer2DModel"),
    (TRANSFORMER, {"quantization_config": {}}, "has quantization_config: quantized weights"),
    (VAE, {"scaling_factor": 0}, r"scaling_factor=0, expected float > 0"),
    (VAE, {"scaling_factor": None}, r"scaling_factor=None, expected float > 0"),
    (VAE, {"layers_per_block": 10**12}, r"layers_per_block=1000000000000, but its file has"),
    (VAE, {"out_channels": 4}, r"out_channels=4, expected int <= 3"),
    (VAE, {"up_block_types": ["UpDecoderBlock2D"]}, r"wrong keys|describes no AutoencoderKL"),
    (VAE, {"quantization_config": {}}, "load the pipeline yourself and call seqpar.parallelize"),
    ("scheduler/scheduler_config.json", {"beta_schedule": "x"}, r"scheduler, which describes no \w+: x is not impl"),
    (INDEX, {"text_encoder": ["a"]}, r"text_encoder=list \['a'\], expected \[library, class\] or \[null, null\]"),
    (INDEX, {"_class_name": ["PixArtAlphaPipeline"]}, r"expected the name of a pipeline's class"),
    *((INDEX, {"safety_checker": [x, "E"]}, rf"safety_checker=\[{x}, E\], expected classes of") for x in ODD),
]


def test_a_part_that_does_not_fit_its_files_is_refused(pixart: Path) -> None:
    assert check(pixart).load.images == 1  # negative control
    for file, fields, message in PARTS:
        with changed(pixart / file, **fields), pytest.raises(ValueError, match=message):
            check(pixart)
    index = pixart / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"has both diffusion_pytorch_model\.safetensors and its index"):
        check(pixart)  # diffusers would load the other one than was checked
    index.unlink()
    check(pixart)


State = dict[str, torch.Tensor]
ENCODERS: Any = transformers  # pyright does not see what it imports lazily


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WHOLE = ENCODERS.CLIPConfig(
    text_config={**SIZES, "vocab_size": 14, "bos_token_id": 0, "eos_token_id": 1},
    vision_config={**SIZES, "image_size": 8, "patch_size": 4},
    projection_dim=16,
)
OF_T5 = ENCODERS.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=14)


def llama(tied: bool) -> Any:
    return ENCODERS.LlamaForCausalLM(ENCODERS.LlamaConfig(vocab_size=14, tie_word_embeddings=tied, **SIZES))


MODELS: dict[str, Callable[[], Any]] = {
    "clip": lambda: pipelines.clip(2, True),
    "t5": lambda: ENCODERS.T5EncoderModel(OF_T5),
    "whole t5": lambda: ENCODERS.T5ForConditionalGeneration(OF_T5),
    "whole clip": lambda: ENCODERS.CLIPModel(WHOLE),
    "llama": lambda: llama(tied=False),
    "tied llama": lambda: llama(tied=True),
    "wan": lambda: pipelines.wan().transformer,
    "vision": lambda: ENCODERS.CLIPVisionModelWithProjection(WHOLE.vision_config),
}


def without(*keys: str) -> Callable[[State], State]:
    return lambda state: {key: x for key, x in state.items() if key not in keys}


def renamed(before: str, after: str) -> Callable[[State], State]:
    return lambda state: {re.sub(before, after, key): x for key, x in state.items()}


def cast(key: str, dtype: torch.dtype) -> Callable[[State], State]:
    return lambda state: state | {key: state[key].to(dtype)}


def added(key: str, tensor: torch.Tensor) -> Callable[[State], State]:
    return lambda state: state | {key: tensor}


QUERY = "encoder.block.1.layer.0.SelfAttention.q.weight"  # of a T5
T5, CLIP, WAN = "T5EncoderModel", "CLIPTextModelWithProjection", "WanTransformer3DModel"
EXTRA = added("extra.weight", torch.ones(2))
POSITIONS = added("text_model.embeddings.position_ids", torch.arange(16)[None])
WEIGHTS: list[tuple[str, str, Callable[[State], State], str | None]] = [  # file, class, change, message (None: it fits)
    ("t5", T5, without(QUERY), rf"wrong keys\. Missing 1: {QUERY}\. Unknown 0"),
    ("t5", T5, renamed(re.escape(QUERY), "x.weight"), r"Missing 1: encoder.*\. Unknown 1: x\.weight"),
    ("t5", T5, EXTRA, r"Missing 0: none\. Unknown 1: extra\.weight"),
    ("t5", T5, added(QUERY, torch.ones(4, 16)), rf"got {QUERY} of shape \(4, 16\), expected \(16, 16\)"),
    ("t5", T5, cast(QUERY, torch.int8), rf"got {QUERY} of type int8, expected floating-point weights"),
    ("t5", T5, cast(QUERY, torch.complex64), rf"got {QUERY} of type complex64, expected floating"),
    ("t5", "UMT5EncoderModel", dict, r"Missing 1: encoder\.block\.1\.layer\.0\.SelfAttention\.relative_attention_bias"),
    ("t5", T5, without("shared.weight", "encoder.embed_tokens.weight"), r"Missing \d: .*shared\.weight"),
    ("vision", "CLIPVisionModelWithProjection", without("visual_projection.weight"), r"Missing 1: visual_projection\."),
    ("llama", "LlamaForCausalLM", without("lm_head.weight"), r"Missing 1: lm_head\.weight"),
    ("wan", WAN, cast("proj_out.weight", torch.int8), r"got proj_out\.weight of type int8, expected"),
    ("wan", WAN, EXTRA, r"Unknown 1: extra\.weight"),
    # what published files hold: other names, names that are tied, buffers, more than the class, several dtypes
    ("t5", T5, without("encoder.embed_tokens.weight"), None),
    ("t5", T5, renamed(r"^shared\.", "encoder.embed_tokens."), None),
    ("t5", T5, cast(QUERY, torch.float16), None),
    ("whole t5", T5, dict, None),
    ("clip", CLIP, renamed(r"^(?!text_)", "text_model."), None),
    ("clip", CLIP, POSITIONS, None),
    ("whole clip", "CLIPTextModel", dict, None),
    ("whole clip", "CLIPTextModel", EXTRA, r"Unknown 1: extra\.weight"),
    ("llama", "LlamaModel", dict, None),
    ("llama", "LlamaModel", EXTRA, r"Unknown 1: extra\.weight"),
    ("tied llama", "LlamaForCausalLM", without("lm_head.weight"), None),
    ("wan", WAN, added("blocks.0.attn2.norm_added_q.weight", torch.ones(2)), None),
]


@pytest.mark.parametrize("bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_a_model_would_not_get_are_refused(tmp_path: Path, name: str, bin: bool) -> None:
    """transformers gives missing weights random values and skips others, and prints a table."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = model.state_dict()
    for _, kind, change, message in (row for row in WEIGHTS if row[0] == name):
        library = "diffusers" if name == "wan" else "transformers"
        made = {key: x.clone().contiguous() for key, x in change(dict(state)).items()}
        if bin:
            file.unlink(missing_ok=True)
            torch.save(made, tmp_path / ("diffusion_pytorch_model.bin" if name == "wan" else "pytorch_model.bin"))
        else:
            save_file(made, file, {"format": "pt"})
        if message is None:
            assert check_model(tmp_path, library, kind) is not None
        else:
            with pytest.raises(ValueError, match=message) as error:
                check_model(tmp_path, library, kind)
            assert str(tmp_path) in str(error.value)


def of_vocabulary(**tokens: object) -> Callable[[Any], Any]:
    def change(content: Any) -> Any:
        return content | {"model": content["model"] | {"vocab": content["model"]["vocab"] | tokens}}

    return change


def of_length(most: object) -> Callable[[Any], Any]:
    return lambda content: content | {"model_max_length": most}


LENGTHS = (0, -1, 10**9, 10**19, "x", [1], float("nan"), True)
TOKENIZERS: list[tuple[str, Callable[[Any], Any], str | None]] = [  # file, its new content, message (None: it is taken)
    *(("tokenizer_config.json", of_length(most), None) for most in (1, 1 << 26, 1e30, 10**30, None)),
    *(("tokenizer_config.json", of_length(most), r"max_length=.*, expected 1 to 67108864 tokens") for most in LENGTHS),
    ("tokenizer.json", of_vocabulary(cat=-1), r"tokenizer\.json, which is no tokenizer: .*`-1`, expected u32"),
    ("tokenizer.json", of_vocabulary(cat=1 << 32), r"which is no tokenizer: .*`4294967296`, expected u32"),
    ("tokenizer.json", of_vocabulary(cat=None), "which is no tokenizer: "),
    ("tokenizer.json", lambda content: {}, "which is no tokenizer: Model missing"),
    ("tokenizer.json", dict, None),
    ("vocab.json", lambda content: {"cat": 1, "dog": 2}, None),
    ("vocab.json", lambda content: {"cat": -1}, r"vocab\.json with token 'cat'=-1, expected a number below 2\^32"),
    ("vocab.json", lambda content: {"cat": "x"}, "with token 'cat'='x', expected a number"),
    ("added_tokens.json", lambda content: {"cat": 1 << 32}, "with token 'cat'=4294967296, expected a number below"),
]


@pytest.mark.parametrize("part", ["tokenizer", "processor"])
def test_tokenizers_that_others_would_fail_on_are_refused(pixart: Path, tmp_path: Path, part: str) -> None:
    """10^9 tokens took 6 GB; the tokenizers library raises errors without a class of its own."""
    shutil.copytree(pixart, tmp_path, dirs_exist_ok=True)
    folder = (tmp_path / "tokenizer").rename(tmp_path / part)
    if part == "processor":
        index = json.loads((tmp_path / "model_index.json").read_text())
        named = index | {"tokenizer": [None, None], part: ["transformers", "CLIPProcessor"]}
        (tmp_path / "model_index.json").write_text(json.dumps(named))
    for file, change, message in TOKENIZERS:
        path = folder / file
        before = path.read_text() if path.exists() else None
        path.write_text(json.dumps(change(json.loads(before or "{}"))))
        if message is None:
            check(tmp_path)
        else:
            with pytest.raises(ValueError, match=message):
                check(tmp_path)
        path.unlink()
        if before is not None:
            path.write_text(before)


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
    with pytest.raises(type(error) if kept else ValueError) as found, context("got a file"):
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
