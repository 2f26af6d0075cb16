"""Tests that missing, truncated or wrong files of a pipeline folder are refused by name before weights load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqpar import Guidance
from seqpar.loading import names
from seqpar.loading import names as hub
from seqpar.loading.vae import check_vae, load_vae
from seqpar.loop.loop import draw_noise
from seqpar.loop.steppers import decide
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import BUILTIN, Files, Pipeline


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the built-in model, which tests may damage."""
    return Path(shutil.copytree(BUILTIN, tmp_path / "copy"))


def test_a_hub_id_brings_decoder_scheduler_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **more: asked.append((name, more)) or str(BUILTIN))
    files, builtin = Files.locate("someone/emoji-dit"), Files.locate("builtin")
    ((name, more),) = asked
    assert name == "someone/emoji-dit"
    assert any(fnmatch("text_encoder_2/model-00001-of-00002.safetensors", each) for each in more["allow_patterns"])
    assert not any(fnmatch("flux1-dev.safetensors", each) for each in more["allow_patterns"])
    assert files.source == BUILTIN
    assert files.labels == builtin.labels
    assert files.vae is not None
    assert files.factor == 4
    assert files.scheduler().config == builtin.scheduler().config
    assert files.class_ids(["rocket"]) == builtin.class_ids(["rocket"])


def test_a_preset_and_a_folder_that_is_none_are_told_apart(tmp_path: Path) -> None:
    assert names.resolve("dit-s/8") is None
    with pytest.raises(ValueError, match=r"is not a folder of diffusers: it has no model_index\.json or config\.json"):
        Files.locate(tmp_path)


def relabel(folder: Path, labels: dict[str, str]) -> Files:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"id2label": labels}))
    return Files.locate(folder)


def test_labels_of_several_names(copy: Path) -> None:
    files = relabel(
        copy,
        {
            "0": "tench, Tinca tinca",
            "134": "crane",
            "517": "crane",
            "638": "maillot",
            "639": "maillot, tank suit",
            "7": "cock",
        },
    )
    for label, number in {
        "tench": 0,
        "Tinca tinca": 0,
        "tench, Tinca tinca": 0,
        "Tinca tinca,tench": 0,
        "maillot, tank suit": 639,
        "tank suit": 639,
        "517": 517,
    }.items():
        assert files.class_ids([label]) == [number]
    assert [files.class_name(number) for number in (0, 517, 639, 5)] == ["tench", "crane", "maillot", "5"]
    with pytest.raises(ValueError, match="'crane', which stands for 134 and 517, expected one of these numbers"):
        files.class_ids(["tench", "crane"])
    for label in ("tench, cock", "tench, pike", "tench,"):
        with pytest.raises(ValueError, match=f"got class '{label}', expected one of .*tench"):
            files.class_ids([label])
    with pytest.raises(ValueError, match=r"a label for class '1000' in model_index\.json, expected numbers 0 to 999"):
        relabel(copy, {"1000": "too far"})


VAE_FILE = "vae/diffusion_pytorch_model.safetensors"


def edit_weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / VAE_FILE)
        change(tensors)
        save_file(tensors, folder / VAE_FILE)

    return apply


def edit_config(**change: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "vae" / "config.json"
        config = json.loads(path.read_text()) | change
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return apply


def truncate_vae(folder: Path) -> None:
    (folder / VAE_FILE).write_bytes((folder / VAE_FILE).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate_vae, "vae.*truncated or not a safetensors file"),
        (lambda folder: (folder / VAE_FILE).unlink(), "vae has no weights"),
        (edit_weights(lambda t: t.pop("decoder.conv_in.bias")), r"Missing 1: decoder\.conv_in\.bias"),
        (edit_weights(dict.clear), "wrong keys"),
        (edit_weights(lambda t: t.update(lora=torch.ones(1))), "Unknown 1: lora"),
        (
            edit_weights(lambda t: t.update({"decoder.conv_in.bias": torch.ones(3)})),
            r"decoder\.conv_in\.bias of shape \(3,\), expected \(64,\)",
        ),
        (edit_config(block_out_channels=None), r"expected \(.*\) for|wrong keys|describes no AutoencoderKL"),
        (edit_config(block_out_channels="wide"), r"config\.json with block_out_channels='wide', expected array"),
        (edit_config(_class_name="AutoencoderDC"), "is a AutoencoderDC; only AutoencoderKL is supported"),
        (lambda folder: (folder / "vae" / "config.json").unlink(), "expected a readable JSON file"),
    ],
    ids=["truncated", "no-file", "missing", "all-missing", "unknown", "shape", "no-channels", "odd", "class", "config"],
)
def test_a_bad_decoder_is_refused_before_weights_load(copy: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(copy)
    with pytest.raises(ValueError, match=message):
        Files.locate(copy)


def test_a_decoder_with_other_latents_is_refused(copy: Path) -> None:
    AutoencoderKL(latent_channels=16).save_pretrained(copy / "vae")
    with pytest.raises(ValueError, match="a decoder of 16 latent channels, expected the model's 4"):
        Files.locate(copy)


def test_a_pipeline_without_a_decoder_makes_previews(copy: Path) -> None:
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"vae": [None, None]}))
    files = Files.locate(copy)
    assert files.vae is None
    assert files.class_ids(["cat"]) == [0]
    assert Pipeline.load(files, Mesh.single()).vae is None


def test_attention_names_of_old_decoders_load(tmp_path: Path) -> None:
    theirs: Any = AutoencoderKL(block_out_channels=(16,), norm_num_groups=4)
    theirs.eval().save_pretrained(tmp_path / "vae")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(key: str) -> str:
        return next((key.replace(new, name) for new, name in old.items() if f".attentions.0.{new}." in key), key)

    edit_weights(lambda t: [t.update({rename(key): t.pop(key)}) for key in list(t)])(tmp_path)
    assert sum("proj_attn" in key for key in load_file(tmp_path / VAE_FILE)) == 4
    assert check_vae(tmp_path / "vae").block_out_channels == [16]
    ours = load_vae(tmp_path / "vae", torch.float32, torch.device("cpu"))
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours.decode(x).sample, theirs.decode(x).sample)
    edit_weights(lambda t: t.pop("decoder.mid_block.attentions.0.query.bias"))(tmp_path)
    with pytest.raises(ValueError, match=r"Missing 1: decoder\.mid_block\.attentions\.0\.to_q\.bias"):
        check_vae(tmp_path / "vae")


@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("KarrasVeScheduler", 4, "which steps with "),
        ("SCMScheduler", 4, "of SCMScheduler's own process for a model whose own, DDIMScheduler, is of diffusion by"),
        ("FlowMatchEulerDiscreteScheduler", 4, "of flow matching for .* expected one of the same, like DDIMSch"),
        ("LTXEulerAncestralRFScheduler", 4, "of flow matching for a model whose own, DDIMScheduler, is of diffusion"),
        ("EDMEulerScheduler", 4, "of EDMEulerScheduler's own process for a model"),
        ("RePaintScheduler", 4, "which steps with .*original_image, mask"),
        ("ScoreSdeVeScheduler", 4, "which steps with "),
        ("VQDiffusionScheduler", 4, "which cannot be built: .*num_vec_classes"),
        ("UnCLIPScheduler", 4, "which cannot be built: .*squaredcos_cap_v2"),
        ("PNDMScheduler", 3, "got 3 steps, which PNDMScheduler cannot do"),
        ("LCMScheduler", 500, "got 500 steps, which LCMScheduler cannot do"),
        (None, 1001, "got 1001 steps, expected 1 to 1000"),
        (None, 0, "got 0 steps, expected 1 to 1000"),
    ],
)
def test_a_scheduler_that_cannot_do_it_is_refused(name: str | None, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Files.locate("builtin").schedule(name, steps)


def test_flow_matching_makes_pictures(copy: Path) -> None:
    """The built-in model was not trained with flow matching, so the test compares latents with diffusers'."""
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 2.0}
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    files = Files.locate(copy)
    assert files.schedule("UniPCMultistepScheduler", 3).config.use_flow_sigmas
    with pytest.raises(ValueError, match=r"of diffusion by betas for .* expected one of the same, like FlowMatch"):
        files.schedule("DDIMScheduler", 3)
    scheduler = files.schedule(None, 3)
    assert str(decide(scheduler)) == "on local tokens (from the last 1 state(s) and 1 output(s))"
    pipeline = Pipeline.load(files, Mesh.single())
    options = {"steps": 3, "guidance": Guidance(1.0), "seed": 1}
    got = pipeline.latents(["cat"], **options)
    x = draw_noise(tuple(got.shape), torch.Generator().manual_seed(1))
    labels = torch.tensor(files.class_ids(["cat"]))
    for t in scheduler.timesteps:
        out = pipeline.dit(x, timestep=t.expand(1), class_labels=labels).sample[:, : x.shape[1]]
        x = scheduler.step(out, t, x).prev_sample
    assert (got - x).abs().max() < 1e-5 * x.abs().max()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("learned", "variance_type 'learned'"), ("learned_range", "a model of 4 output channels, expected 8")],
)
def test_variances_of_a_model_without_them_are_refused(copy: Path, kind: str, message: str) -> None:
    path = copy / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "DDPMScheduler", "variance_type": kind}))
    with pytest.raises(ValueError, match=message):
        Files.locate(copy).schedule(None, 4)


def test_a_scheduler_whose_package_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsScheduler:
        @staticmethod
        def from_config(config: object) -> None:
            raise ImportError("\nNeedsScheduler requires the torchsde library\n")

    monkeypatch.setattr(diffusers, "NeedsScheduler", NeedsScheduler, raising=False)
    with pytest.raises(ValueError, match="'NeedsScheduler', which cannot be built: NeedsScheduler requires the torch"):
        Files.locate("builtin").scheduler("NeedsScheduler")


@pytest.mark.parametrize(
    ("name", "eta", "message"),
    [
        (None, 1.1, "got eta 1.1, expected 0"),
        (None, -0.1, "got eta -0.1"),
        (None, float("nan"), "got eta nan"),
        ("UniPCMultistepScheduler", 0.5, "got eta 0.5 with UniPCMultistepScheduler, expected 0"),
    ],
)
def test_eta_is_checked(name: str | None, eta: float, message: str) -> None:
    files = Files.locate("builtin")
    with pytest.raises(ValueError, match=message):
        files.schedule(name, 4, eta)
    files.schedule(None, 4, 1.0)


def test_the_schedule_says_how_often_the_model_is_called() -> None:
    calls, files = [], Files.locate("builtin")
    Pipeline.load(files, Mesh.single()).latents(
        ["cat"], steps=3, guidance=Guidance(1.0), scheduler="HeunDiscreteScheduler", on_step=calls.append
    )
    assert len(calls) == len(files.schedule("HeunDiscreteScheduler", 3).timesteps) == 5
