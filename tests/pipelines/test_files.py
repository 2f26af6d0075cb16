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
from seqpar.loading import names, schedulers
from seqpar.loading.folder import load_vae, open_vae
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
    monkeypatch.setattr(names.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(names, "snapshot_download", lambda name, **more: asked.append((name, more)) or str(BUILTIN))
    files, builtin = Files.locate("someone/emoji-dit"), Files.locate("builtin")
    ((name, more),) = asked
    assert name == "someone/emoji-dit"
    assert any(fnmatch("text_encoder_2/model-00001-of-00002.safetensors", each) for each in more["allow_patterns"])
    assert not any(fnmatch("flux1-dev.safetensors", each) for each in more["allow_patterns"])
    assert (files.source, files.labels, files.factor) == (BUILTIN, builtin.labels, 4)
    assert files.vae is not None
    assert files.scheduler().config == builtin.scheduler().config


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder of diffusers: it has no model_index\.json or config\.json"):
        Files.locate(tmp_path)


def relabel(folder: Path, labels: dict[str, str]) -> Files:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"id2label": labels}))
    return Files.locate(folder)


LABELS = {
    "0": "tench, Tinca tinca",
    "134": "crane",
    "517": "crane",
    "638": "maillot",
    "639": "maillot, tank suit",
    "7": "cock",
}
NUMBERS = {"tench": 0, "Tinca tinca": 0, "tench, Tinca tinca": 0, "Tinca tinca,tench": 0, "maillot, tank suit": 639}
NUMBERS |= {"tank suit": 639, "517": 517}


def test_labels_of_several_names(copy: Path) -> None:
    files = relabel(copy, LABELS)
    for label, number in NUMBERS.items():
        assert files.class_ids([label]) == [number]
    assert [files.class_name(number) for number in (0, 517, 639, 5)] == ["tench", "crane", "maillot", "5"]
    with pytest.raises(ValueError, match="'crane', which stands for 134 and 517, expected one of these numbers"):
        files.class_ids(["tench", "crane"])
    for label in ("tench, cock", "tench, pike", "tench,"):
        with pytest.raises(ValueError, match=f"got class '{label}', expected one of .*tench"):
            files.class_ids([label])
    with pytest.raises(ValueError, match=r"a label for class '1000' in model_index\.json, expected numbers 0 to 999"):
        relabel(copy, {"1000": "too far"})
    builtin = Files.locate("builtin")
    assert builtin.class_ids(["cat", "1", 47]) == [0, 1, 47]
    near = {"rockett": "rocket", "Pizza": "pizza", "48": "0 to 47", "-1": "0 to 47", "@#": "in all"}
    for label, name in near.items():
        with pytest.raises(ValueError, match=rf"got class '{label}', expected .*{name}"):
            builtin.class_ids([label])


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


BIAS = "decoder.conv_in.bias"
DECODERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (edit_weights(lambda t: t.pop(BIAS)), r"Missing 1: decoder\.conv_in\.bias"),
    "no channels": (edit_config(block_out_channels=None), r"expected \(.*\) for|wrong keys|describes no AutoencoderKL"),
    "odd channels": (edit_config(block_out_channels="wide"), r"with block_out_channels='wide', expected array"),
    "other class": (edit_config(_class_name="AutoencoderDC"), "is a AutoencoderDC; only AutoencoderKL is supported"),
    "no config": (lambda folder: (folder / "vae" / "config.json").unlink(), "expected a readable JSON file"),
    "other latents": (
        lambda folder: AutoencoderKL(latent_channels=16).save_pretrained(folder / "vae"),
        "a decoder of 16 latent channels, expected the model's 4",
    ),
}


@pytest.mark.parametrize("case", DECODERS)
def test_a_bad_decoder_is_refused_before_weights_load(copy: Path, case: str) -> None:
    spoil, message = DECODERS[case]
    spoil(copy)
    with pytest.raises(ValueError, match=message):
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
    assert open_vae(tmp_path / "vae").model.config.block_out_channels == [16]
    ours = load_vae(tmp_path / "vae", torch.float32, torch.device("cpu"))
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours.decode(x).sample, theirs.decode(x).sample)
    edit_weights(lambda t: t.pop("decoder.mid_block.attentions.0.query.bias"))(tmp_path)
    with pytest.raises(ValueError, match=r"Missing 1: decoder\.mid_block\.attentions\.0\.to_q\.bias"):
        open_vae(tmp_path / "vae")


SCHEDULERS: list[tuple[str | None, int, float | None, str]] = [
    ("KarrasVeScheduler", 4, None, "which steps with "),
    ("SCMScheduler", 4, None, "of SCMScheduler's own process for a model whose own, DDIMScheduler, is of diffusion by"),
    ("FlowMatchEulerDiscreteScheduler", 4, None, "of flow matching for .* expected one of the same, like DDIMSch"),
    ("VQDiffusionScheduler", 4, None, "which cannot be built: .*num_vec_classes"),
    ("PNDMScheduler", 3, None, "got 3 steps, which PNDMScheduler cannot do"),
    ("LCMScheduler", 500, None, "got 500 steps, which LCMScheduler cannot do"),
    (None, 1001, None, "got 1001 steps, expected 1 to 1000"),
    (None, 0, None, "got 0 steps, expected 1 to 1000"),
    (None, 4, 1.1, "got eta 1.1, expected 0"),
    (None, 4, -0.1, "got eta -0.1"),
    (None, 4, float("nan"), "got eta nan"),
    ("UniPCMultistepScheduler", 4, 0.5, "got eta 0.5 with UniPCMultistepScheduler, expected 0"),
]


def test_a_scheduler_that_cannot_do_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files.locate("builtin")
    files.schedule(None, 4, 1.0)  # a negative control
    for name, steps, eta, message in SCHEDULERS:
        with pytest.raises(ValueError, match=message):
            files.schedule(name, steps, eta)

    class NeedsScheduler:
        @staticmethod
        def from_config(config: object) -> None:
            raise ImportError("\nNeedsScheduler requires the torchsde library\n")

    monkeypatch.setattr(diffusers, "NeedsScheduler", NeedsScheduler, raising=False)
    monkeypatch.setattr(schedulers, "known", lambda: ("NeedsScheduler",))
    with pytest.raises(ValueError, match="'NeedsScheduler', which cannot be built: NeedsScheduler requires the torch"):
        files.scheduler("NeedsScheduler")


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
