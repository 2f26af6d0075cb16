# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
"""`--lora` against diffusers' loading of the same files: images of FLUX.1, and pairs of Wan 2.2 in each format."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import save_file
from torch import Tensor

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading import lora
from seqpar.loading.lora import Lora, check, load, parse
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.serve.ranks.checked import FittingLoras, loras_in
from seqpar.transformer import lora as lora_files
from tests.cli.loras import FORMATS, ORIGINAL, RANK, of_wan, wan_model, written
from tests.cli.runs import SAME, parameters, pixels, shown, theirs
from tests.cli.test_refused import told
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.meshes import random
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

THEIRS: Any = diffusers
ROUNDED = 0.51 / 255  # of a picture in a file
SIDE = 16  # of a picture of the tiny FLUX.1 if nobody names a size: its decoder's sample_size
TOLERANCE = 5e-5  # of pixels: the pipeline keeps latents in fp32
ASKED: Any = {"height": 48, "width": 80, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}

# Pictures of FLUX.1 ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")  # diffusers alone, with a second file
@pytest.mark.usefixtures("no_gpu")
def test_pictures_are_those_of_diffusers_with_the_same_files(
    ranks: Pool, folders: Callable[[str], Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    folder, style, other = folders("flux"), loras["style"], loras["other"]
    plain = Args(str(folder), prompt=("a red cat",), steps=2, seed=3, dtype="fp64", out=tmp_path / "x.png")
    both = replace(plain, lora=(f"{style}:0.5", str(other)))
    scales = ({style: 0.5, other: 1.0}, {style: 0.5}, {style: 0.6, other: 1.0}, {})
    truth, *controls = (
        theirs(folder, dtype=torch.float64, loras=files, height=SIDE, width=SIDE, max_sequence_length=512)
        for files in scales
    )
    (out, bars), silent = ranks.run(2, shown, both)
    assert f"lora      {style}:0.5\nlora      {other}:1\n" in out
    assert "2/2" in bars
    assert silent == ("", "")
    picture = pixels(plain.out)
    assert picture.shape == (SIDE, SIDE, 3)
    assert abs(picture - truth).max() < ROUNDED
    assert parameters(plain.out)["lora"] == [f"{style}:0.5", str(other)]
    assert all(abs(picture - control).max() > 5 * ROUNDED for control in controls)
    run(replace(plain, lora=(f"{style}:0",)))
    assert abs(pixels(plain.out) - controls[-1]).max() <= SAME


def test_negative_control_a_file_that_diffusers_leaves_out_is_noticed(
    loras: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipelines.flux()
    models = {"transformer": (type(pipe.transformer), pipe.transformer.config)}
    style = check([Lora(str(loras["style"]))], type(pipe), models)
    load(pipe, style)
    for taken, missing in (("transformer", "text_encoder, of which"), ("text_encoder", "which does not fit")):
        left = pipelines.flux()
        monkeypatch.setattr(type(left), "load_lora_weights", lambda *_, **__: None)
        setattr(left, taken, getattr(pipe, taken))  # the other part is as it was before
        with pytest.raises(ValueError, match=missing):
            load(left, style)


def test_a_lora_of_another_model_is_the_same_error_on_every_rank(
    ranks: Pool, folders: Callable[[str], Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"prompt": ("a red cat",), "lora": (str(loras["sd3"]),), "out": tmp_path / "x.png"}
    one, other = ranks.run(2, told, Args(str(folders("flux")), **flags))
    assert one == other
    assert one[0].startswith("got --lora ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", Lora("a.safetensors")),
        ("a.safetensors:0.5", Lora("a.safetensors", 0.5)),
        ("a:b.safetensors:-2", Lora("a:b.safetensors", -2.0)),
        ("C:\\styles\\a.safetensors", Lora("C:\\styles\\a.safetensors")),
        ("a.safetensors:", Lora("a.safetensors:")),
    ],
)
def test_the_last_colon_begins_a_scale_where_a_number_follows(text: str, expected: Lora) -> None:
    assert parse(text) == expected


# Pairs of Wan 2.2 --------------------------------------------------------------------------------------------------


@cache
def wan_of(folder: Path) -> Any:
    return pipelines.quiet(THEIRS.WanPipeline.from_pretrained(folder, torch_dtype=torch.float64))


def by_diffusers(folder: Path, high: Path | None, low: Path | None, second: bool = True, scale: float = 0.8) -> Any:
    """diffusers' pipeline with a pair, until the next call. second: whether the second transformer gets its file."""
    pipe = wan_of(folder)
    pipe.unload_lora_weights()
    for name, file, into in (("high", high, False), ("low", low, second)):
        if file is not None:
            named = {"weight_name": file.name, "adapter_name": name}
            pipe.load_lora_weights(str(file.parent), **named, load_into_transformer_2=into)
    if high is not None and low is not None:
        pipe.set_adapters(["high", "low"], [1.0, scale])
    return pipe


def job_of(folder: Path, *loras: object) -> Any:
    files = tuple(parse(str(file)) for file in loras)
    request = GenerationRequest(str(folder), torch.float64, prompts=("a red cat",), loras=files)
    return Source.locate(folder).check(request)


def merged(folder: Path, *loras: object, mesh: Mesh | None = None) -> Any:
    pipe: Any = job_of(folder, *loras).load_pipeline(mesh or Mesh.single())
    assert not any(getattr(pipe, name).__dict__.get("peft_config") for name in ("transformer", "transformer_2"))
    return pipe


@torch.no_grad()
def outputs(pipe: Any) -> Tensor:
    """What all layers of both transformers' blocks, and their last one, make of random numbers."""
    found = list[Tensor]()
    for model in (pipe.transformer, pipe.transformer_2):
        names = [f"blocks.{block}.{name}" for block in range(2) for name in ORIGINAL]
        for seed, name in enumerate([*names, "proj_out"]):
            layer = model.get_submodule(name)
            found.append(layer(random((3, layer.in_features), seed)).flatten())
    return torch.cat(found)


def frames(pipe: Any) -> np.ndarray:
    made = pipelines.quiet(pipe)("a red cat", generator=pipelines.seeded(3), output_type="np", **ASKED)
    return made.frames[0]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")  # diffusers alone, with a second file
@pytest.mark.parametrize("kind", FORMATS)
def test_each_file_of_a_pair_changes_its_transformer(folders: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = folders("wan22")
    files = written(tmp_path, {"high_noise": of_wan(kind, 1), "low_noise": of_wan(kind, 2)})
    high, low = files["high_noise"], files["low_noise"]
    truth = outputs(by_diffusers(folder, high, low))
    named, by_files = (f"{high}@transformer", f"{low}:0.8@transformer_2"), (f"{low}:0.8", high)
    if kind == "peft":  # a negative control
        assert abs(truth - outputs(by_diffusers(folder, high, low, second=False))).max() > 0.01
    for loras in (named, by_files) if kind == "peft" else (by_files,):
        assert abs(outputs(merged(folder, *loras)) - truth).max() < 1e-12


def video(rank: int, world: int, device: torch.device, folder: Path, loras: tuple[str, ...], merge: bool) -> np.ndarray:
    """The video with LoRAs beside the weights, as in Python, or merged, as by the command."""
    mesh = mesh_of(device, ulysses=world)
    if merge:
        pipe = merged(folder, *loras, mesh=mesh)
        seqpar.parallelize(pipe, mesh)
    else:
        pipe = seqpar.load(str(folder), dtype=torch.float64, mesh=mesh, loras=loras)
    made = frames(pipe)
    seqpar.release(pipe)
    return made


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")
def test_a_video_with_a_pair_is_diffusers_own_merged_or_beside_the_weights(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, files = folders("wan22"), written(tmp_path, {"high": of_wan("distilled", 1), "low": of_wan("distilled", 2)})
    truth = frames(by_diffusers(folder, files["high"], files["low"]))
    assert abs(truth - frames(by_diffusers(folder, None, None))).max() > 100 * TOLERANCE
    loras = (f"{files['high']}@transformer", f"{files['low']}:0.8@transformer_2")
    for world, merge in ((1, False), (2, True)):
        for made in ranks.run(world, video, folder, loras, merge):
            assert abs(made - truth).max() < TOLERANCE, (world, merge)


@pytest.mark.usefixtures("no_gpu")
def test_one_file_for_both_transformers_with_ranks_and_alphas_in_its_header(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Keys that begin with the names of both; diffusers reads one file a transformer, here with the same header."""
    layers = [f"blocks.{block}.{name}" for block in range(2) for name in ORIGINAL]
    facts = {"r": RANK, "lora_alpha": 5, "target_modules": layers}

    def save(name: str, tensors: dict[str, Tensor], *parts: str) -> Path:
        header = {f"{part}.{key}": value for part in parts for key, value in facts.items()}
        metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(header)}
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata)
        return tmp_path / f"{name}.safetensors"

    folder, first, second = folders("wan22"), of_wan("peft", 1), of_wan("peft", 2)
    pair = {**first, **of_wan("peft", 2, "transformer_2")}
    pair_file = save("pair", pair, "transformer", "transformer_2")
    a, b = save("a", first, "transformer"), save("b", second, "transformer")
    truth = outputs(by_diffusers(folder, a, b, scale=1.0))
    assert abs(outputs(merged(folder, pair_file)) - truth).max() < 1e-12
    plain = written(tmp_path, {"c": first, "d": second})  # whose alphas are their ranks
    assert abs(truth - outputs(by_diffusers(folder, plain["c"], plain["d"], scale=1.0))).max() > 0.01


@torch.no_grad()
@pytest.mark.usefixtures("no_gpu")
def test_a_lora_of_texts_fits_a_transformer_that_reads_image_features(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """diffusers adds zero layers for the features, which the file does not have."""
    folder, file = folders("wan_i2v"), written(tmp_path, {"style": of_wan("peft", 1)})["style"]
    theirs = THEIRS.WanImageToVideoPipeline.from_pretrained(folder, torch_dtype=torch.float64)
    layers = [f"blocks.{block}.{name}" for block in range(2) for name in ORIGINAL]

    def made(pipe: Any) -> Tensor:
        modules = [pipe.transformer.get_submodule(name) for name in layers]
        return torch.cat([layer(random((3, layer.in_features), n)).flatten() for n, layer in enumerate(modules)])

    plain = made(theirs)
    theirs.load_lora_weights(str(tmp_path), weight_name=file.name)
    truth = made(theirs)
    assert abs(truth - plain).max() > 0.01
    pipe = seqpar.load(str(folder), dtype=torch.float64, loras=(str(file),))
    assert abs(made(pipe) - truth).max() < 1e-12


def switching(rank: int, world: int, device: torch.device, folder: Path, loras: Path) -> list[np.ndarray]:
    """Videos of a server's pipeline: with both LoRAs, without, with a third in the second transformer, with both."""
    mesh, job = mesh_of(device, ulysses=world), job_of(folder)
    fitting = FittingLoras.of(job, loras_in(loras))
    names = ["high@transformer", "low@transformer_2", "style@transformer", "style@transformer_2"]
    assert (list(fitting.by_name), fitting.reasons) == (names, {})
    pipe = job.load_pipeline(mesh)
    merging = lora_files.switched(pipe, fitting.by_name, Mesh.single())
    seqpar.parallelize(pipe, mesh)
    made = []
    pair = (("high@transformer", 1.0), ("low@transformer_2", 0.8))
    for wanted in (pair, (), (("style@transformer_2", 1.0),), pair):
        merging.switch(wanted)
        made.append(frames(pipe))
    seqpar.release(pipe)
    return made


@pytest.mark.usefixtures("no_gpu")
def test_a_server_switches_the_loras_of_both_transformers(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, kinds = folders("wan22"), {"high": "lightning", "low": "lightning", "style": "trained"}
    files = written(tmp_path, {name: of_wan(kind, seed) for seed, (name, kind) in enumerate(kinds.items(), start=1)})
    pairs = ((files["high"], files["low"]), (None, None), (None, files["style"]))
    pair, none, second = (frames(by_diffusers(folder, *each)) for each in pairs)
    truths = [pair, none, second, pair]
    assert min(abs(a - b).max() for a, b in pairwise(truths)) > 100 * TOLERANCE
    for videos in ranks.run(2, switching, folder, tmp_path):
        assert max(abs(a - b).max() for a, b in zip(videos, truths, strict=True)) < TOLERANCE
        assert np.array_equal(videos[0], videos[3])


@pytest.mark.usefixtures("no_gpu")
def test_float8_is_taken_and_rank_0_prints_where_files_go_and_what_diffusers_leaves_out(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, norm = folders("wan22"), {"diffusion_model.blocks.1.norm3.diff": torch.ones(60)}
    small = {key: x.to(torch.float8_e4m3fn) for key, x in of_wan("peft", 1).items()}
    files = written(tmp_path, {"high": small, "low": {**of_wan("distilled", 2), **norm}})
    high, low = str(files["high"]), f"{files['low']}:0.5"
    truth = outputs(by_diffusers(folder, files["high"], files["low"], scale=0.5))
    assert abs(outputs(seqpar.load(str(folder), dtype=torch.float64, loras=(high, low))) - truth).max() < 1e-12
    lines = [line for line in capsys.readouterr().out.splitlines() if "LoRA" in line]
    assert lines == [
        f"seqpar: LoRA {high} changes transformer",
        f"seqpar: LoRA {files['low']} changes transformer_2",
        f"seqpar: LoRA {files['low']}: 1 differences of norms are left out, as diffusers leaves them out",
    ]
    in_summary = [str(each) for each in job_of(folder, high, low).request.loras]
    assert in_summary == [f"{high}:1@transformer", f"{low}@transformer_2"]


# Which transformer a file is for, and numbers that no LoRA has ------------------------------------------------------

SMALL = {
    f"transformer.blocks.0.attn1.to_q.lora_{key}.weight": 0.3 * random(shape, 1)
    for key, shape in (("A", (2, 60)), ("B", (60, 2)))
}


def placed(file: Path, text: str = "", transformers: int = 2) -> list[str | None]:
    model = THEIRS.WanTransformer3DModel, wan_model().config
    models: Any = dict.fromkeys(("transformer", "transformer_2")[:transformers], model)
    return [each.transformer for each in check([parse(f"{file}{text}")], THEIRS.WanPipeline, models)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Wan22_A14B_T2V_HIGH_Lightning_4steps_lora_250928_rank128_fp16", "transformer"),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_LOW_fp16", "transformer_2"),
        ("wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022", "transformer_2"),
        ("low_noise_model", "transformer_2"),
        ("styleHighNoise", "transformer"),
        ("Style-lownoise-v2", "transformer_2"),
        ("high", "transformer"),
        ("style-low_e30", "transformer_2"),
        *((name, None) for name in ("style", "low_poly", "high-contrast", "yellow", "highlow", "allhigh")),
        *((name, None) for name in ("high_noise_and_low_noise", "lowlight", "thigh", "high_noisette")),
    ],
)
def test_the_name_of_a_file_says_its_transformer_only_where_it_cannot_mean_a_style(
    tmp_path: Path, name: str, expected: str | None
) -> None:
    file = written(tmp_path, {name: SMALL})[name]
    if expected is None:
        with pytest.raises(ValueError, match=r"which of 2 transformers it is for; add @transformer \(high"):
            placed(file)
    else:
        assert placed(file) == [expected]
    assert placed(file, ":0.5@transformer_2") == ["transformer_2"]
    assert placed(file, transformers=1) == placed(file, "@transformer", transformers=1) == [None]


def test_a_transformer_that_a_pipeline_lacks_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    second = {key.replace("former.", "former_2."): x for key, x in SMALL.items()}
    files = written(tmp_path, {"style": SMALL, "second": second})
    for name, text, transformers, message in (
        ("style", "@transformer_2", 1, r"WanPipeline has no transformer_2; its transformers: transformer$"),
        ("style", ":1@unet", 2, r"has no unet; its transformers: transformer, transformer_2"),
        ("second", "@transformer", 2, r"its keys are those of transformer_2; leave the @ out"),
        ("second", "", 1, r"with the key transformer_2\.blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            placed(files[name], text, transformers)
    assert placed(files["second"]) == ["transformer_2"]


ALPHA_KEY, DOWN_KEY = "lora_unet_blocks_1_ffn_0.alpha", "lora_unet_blocks_1_ffn_0.lora_down.weight"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((ALPHA_KEY, torch.tensor(x), f"is {x:g} of shape ()") for x in (-4.0, 0.0, float("nan"), float("inf"))),
        (ALPHA_KEY, torch.tensor(-4), "is -4 of shape ()"),
        (ALPHA_KEY, torch.ones(2), "an alpha must be one positive, finite number"),
        (ALPHA_KEY, torch.tensor(1j), "an alpha must be one positive, finite number"),
        (DOWN_KEY, torch.full((RANK, 60), float("nan")), "has values that are not finite"),
        (DOWN_KEY, torch.full((RANK, 60), float("inf")).half(), "has values that are not finite"),
        (DOWN_KEY, torch.full((RANK, 60), float("nan")).to(torch.float8_e4m3fn), "has values that are not finite"),
        (DOWN_KEY, torch.ones(RANK, 60, dtype=torch.complex64), "is of type complex64; LoRA weights must be real"),
        (DOWN_KEY, torch.ones(RANK, 60, dtype=torch.int8), "is of type int8; LoRA weights must be real"),
        (DOWN_KEY, torch.ones(0, 60), "is empty, of shape (0, 60)"),
        (DOWN_KEY, torch.ones(RANK + 1, 60), "of shape (3, 60) and lora_unet_blocks_1_ffn_0.lora_up.weight of shape"),
        (DOWN_KEY, torch.ones(60), "differ in rank"),
    ],
)
def test_numbers_that_no_lora_has_are_refused_before_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Tensor, message: str
) -> None:
    """diffusers' conversion of a negative alpha never ends."""
    file = written(tmp_path, {"high": {**of_wan("musubi", 1), key: value}})["high"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("diffusers reads the file")

    monkeypatch.setattr(THEIRS.WanPipeline, "lora_state_dict", refuse)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        placed(file)
    assert f"--lora {file}: {key}" in str(error.value)


def test_a_conversion_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before = written(tmp_path, {"high": SMALL})["high"], threading.active_count()

    def endless(*_: object, **__: object) -> None:
        while True:
            pass

    monkeypatch.setattr(THEIRS.WanPipeline, "lora_state_dict", endless)
    monkeypatch.setattr(lora, "CONVERSION_S", 0.2)
    with pytest.raises(ValueError, match=r"high.safetensors, which WanPipeline cannot read: .* not end within 0\.2"):
        placed(file)
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
