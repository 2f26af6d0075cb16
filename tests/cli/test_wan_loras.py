# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
"""Pairs of LoRAs of Wan 2.2, one for each transformer, in each format in use, against diffusers' own loading."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
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
from seqpar.loading import lora
from seqpar.loading.lora import check, parse
from seqpar.pipelines.diffusers import Source
from seqpar.pipelines.request import GenerationRequest
from seqpar.serve.ranks.checked import FittingLoras, loras_in
from seqpar.transformer import lora as lora_files
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.meshes import random
from tests.support.pool import Pool

THEIRS: Any = diffusers
TOLERANCE = 5e-5  # of pixels: the pipeline keeps latents in fp32
ASKED: dict[str, Any] = {
    "height": 48,
    "width": 80,
    "num_frames": 5,
    "num_inference_steps": 2,
    "max_sequence_length": 16,
}
RANK, ALPHA = 2, 3.0
ATTENTION = (("q", "q"), ("k", "k"), ("v", "v"), ("out.0", "o"))
ORIGINAL = {  # names of the authors, of layers in a block
    **{f"attn1.to_{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION},
    **{f"attn2.to_{ours}": f"cross_attn.{theirs}" for ours, theirs in ATTENTION},
    **{"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
}
# of a file's header: ranks and alphas, which diffusers takes from there
FACTS = {"r": RANK, "lora_alpha": 5, "target_modules": [f"blocks.{i}.{name}" for i in range(2) for name in ORIGINAL]}
TensorsOf = Callable[[int], dict[str, Tensor]]


def layers(seed: int) -> dict[tuple[int, str], tuple[Tensor, Tensor, int]]:
    """Return the matrices of a LoRA of each layer, and the layer's number of outputs, by block and name."""
    made, model = {}, pipelines.wan().transformer
    for block in range(2):
        for number, name in enumerate(ORIGINAL):
            wide, narrow = model.get_submodule(f"blocks.{block}.{name}").weight.shape
            first = 1000 * seed + 100 * block + 2 * number
            made[block, name] = (0.3 * random((RANK, narrow), first), 0.3 * random((wide, RANK), first + 1), wide)
    return made


def peft(seed: int, part: str = "transformer") -> dict[str, Tensor]:
    """Return a LoRA as diffusers saves it, for whichever transformer."""
    keys = {"A": 0, "B": 1}
    return {
        f"{part}.blocks.{block}.{name}.lora_{key}.weight": each[index].contiguous()
        for (block, name), each in layers(seed).items()
        for key, index in keys.items()
    }


def lightning(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the authors' names, lora_down, lora_up and alphas, as the Lightning pairs have them."""
    made = {}
    for (block, name), (down, up, _) in layers(seed).items():
        begin = f"diffusion_model.blocks.{block}.{ORIGINAL[name]}"
        made |= {
            f"{begin}.lora_down.weight": down,
            f"{begin}.lora_up.weight": up,
            f"{begin}.alpha": torch.tensor(ALPHA),
        }
    return made


def trained(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the authors' names, lora_A and lora_B, as most trainers write it."""
    ends = {"lora_down": "lora_A", "lora_up": "lora_B"}
    plain = {key: x for key, x in lightning(seed).items() if not key.endswith("alpha")}
    return {key.replace(end, ends[end]): x for key, x in plain.items() for end in ends if end in key}


def distilled(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the differences of biases, of norms (none) and of the last layer, as the distilled pairs."""
    made = lightning(seed)
    made = {key: x for key, x in made.items() if not key.endswith("alpha")}
    for (block, name), (_, _, wide) in layers(seed).items():
        made[f"diffusion_model.blocks.{block}.{ORIGINAL[name]}.diff_b"] = 0.1 * random((wide,), 7 * seed + block)
    for block in range(2):
        made[f"diffusion_model.blocks.{block}.norm3.diff"] = torch.zeros(60)
        made[f"diffusion_model.blocks.{block}.norm3.diff_b"] = torch.zeros(60)
    model = pipelines.wan().transformer
    made["diffusion_model.head.head.diff"] = 0.1 * random(tuple(model.proj_out.weight.shape), 9 * seed)
    made["diffusion_model.head.head.diff_b"] = 0.1 * random((len(model.proj_out.bias),), 9 * seed + 1)
    return made


def musubi(seed: int) -> dict[str, Tensor]:
    """Return a LoRA as musubi-tuner writes it, with kohya's names."""
    made = {}
    for key, x in lightning(seed).items():
        name, dot, end = key.removeprefix("diffusion_model.").partition(".lora_" if ".lora_" in key else ".alpha")
        made[f"lora_unet_{name.replace('.', '_')}{dot}{end}"] = x
    return made


FORMATS: dict[str, TensorsOf] = {
    "peft": peft,
    "lightning": lightning,
    "trained": trained,
    "distilled": distilled,
    "musubi": musubi,
}


def written(folder: Path, names: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Path]:
    """Write LoRAs, and return their files by their names."""
    for name, tensors in names.items():
        save_file({key: x.clone() for key, x in tensors.items()}, folder / f"{name}.safetensors", {"format": "pt"})
    return {name: folder / f"{name}.safetensors" for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wan22")
    pipelines.wan(2).save_pretrained(made)
    return made


def frames(pipe: Any) -> np.ndarray:
    return pipe("a red cat", generator=pipelines.seeded(3), output_type="np", **ASKED).frames[0]


def theirs(
    folder: Path, high: Path | None, low: Path | None, second: bool = True, scales: tuple[float, float] = (1.0, 0.8)
) -> np.ndarray:
    """Return the video by diffusers alone. second: whether the second file goes into the second transformer."""
    pipe = pipelines.quiet(THEIRS.WanPipeline.from_pretrained(folder, torch_dtype=torch.float64))
    for name, file, into in (("high", high, False), ("low", low, second)):
        if file is not None:
            pipe.load_lora_weights(
                str(file.parent), weight_name=file.name, adapter_name=name, load_into_transformer_2=into
            )
    if high is not None and low is not None:
        pipe.set_adapters(["high", "low"], list(scales))
    return frames(pipe)


def ours(rank: int, world: int, device: torch.device, folder: str, loras: tuple[str, ...], merged: bool) -> np.ndarray:
    """Return the video of a pipeline with LoRAs, beside its weights as in Python, or merged as by the command."""
    mesh = mesh_of(device, ulysses=world)
    if merged:
        request = GenerationRequest(folder, torch.float64, prompts=("a red cat",), loras=tuple(map(parse, loras)))
        job: Any = Source.locate(Path(folder)).check(request)
        pipe = job.load_pipeline(mesh)
        assert not any(getattr(pipe, name).__dict__.get("peft_config") for name in ("transformer", "transformer_2"))
        seqpar.parallelize(pipe, mesh)
    else:
        pipe = seqpar.load(folder, dtype=torch.float64, mesh=mesh, loras=loras)
    made = frames(pipelines.quiet(pipe))
    seqpar.release(pipe)
    return made


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")  # diffusers alone, with a second file
@pytest.mark.parametrize("kind", FORMATS)
def test_each_file_of_a_pair_changes_its_transformer(ranks: Pool, folder: Path, tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, {"high_noise": FORMATS[kind](1), "low_noise": FORMATS[kind](2)})
    high, low = files["high_noise"], files["low_noise"]
    truth = theirs(folder, high, low)
    controls = [theirs(folder, None, None), theirs(folder, high, None), theirs(folder, high, low, second=False)]
    assert min(abs(truth - control).max() for control in controls) > 100 * TOLERANCE
    named = (f"{high}@transformer", f"{low}:0.8@transformer_2")
    for world, loras, merged in ((1, named, True), (2, (f"{low}:0.8", str(high)), True), (2, named, False)):
        for video in ranks.run(world, ours, str(folder), loras, merged):
            assert abs(video - truth).max() < TOLERANCE, (world, merged)


@pytest.mark.usefixtures("no_gpu")
def test_one_file_for_both_transformers_with_ranks_and_alphas_in_its_header(folder: Path, tmp_path: Path) -> None:
    """Keys that begin with the names of both; diffusers reads one file a transformer, here with the same header."""
    header = {f"{part}.{key}": value for part in ("transformer", "transformer_2") for key, value in FACTS.items()}
    pair = {**peft(1), **peft(2, "transformer_2")}
    save_file(pair, tmp_path / "pair.safetensors", {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(header)})
    only = json.dumps({f"transformer.{key}": value for key, value in FACTS.items()})
    for name, seed in (("a", 1), ("b", 2)):
        save_file(peft(seed), tmp_path / f"{name}.safetensors", {"format": "pt", LORA_ADAPTER_METADATA_KEY: only})
    truth = theirs(folder, tmp_path / "a.safetensors", tmp_path / "b.safetensors", scales=(1.0, 1.0))
    loras = (str(tmp_path / "pair.safetensors"),)
    assert abs(ours(0, 1, torch.device("cpu"), str(folder), loras, merged=True) - truth).max() < TOLERANCE
    plain = written(tmp_path, {"c": peft(1), "d": peft(2)})
    control = theirs(folder, plain["c"], plain["d"], scales=(1.0, 1.0))
    assert abs(truth - control).max() > 100 * TOLERANCE  # whose alphas are their ranks


def switching(rank: int, world: int, device: torch.device, folder: str, loras: str) -> list[np.ndarray]:
    """Return videos of a server's pipeline: with both LoRAs, without, with a third in either transformer, with both."""
    mesh = mesh_of(device, ulysses=world)
    job = Source.locate(Path(folder)).check(GenerationRequest(folder, torch.float64, prompts=("a red cat",)))
    fitting = FittingLoras.of(job, loras_in(Path(loras)))
    assert not fitting.reasons
    assert list(fitting.by_name) == [
        "high@transformer",
        "low@transformer_2",
        "style@transformer",
        "style@transformer_2",
    ]
    pipe = pipelines.quiet(job.load_pipeline(mesh))
    merging = lora_files.switched(pipe, fitting.by_name)
    seqpar.parallelize(pipe, mesh)
    made = []
    pair = (("high@transformer", 1.0), ("low@transformer_2", 0.8))
    for wanted in (pair, (), (("style@transformer_2", 1.0),), pair, (("style@transformer", 1.0),)):
        merging.switch(wanted)
        made.append(frames(pipe))
    seqpar.release(pipe)
    return made


@pytest.mark.usefixtures("no_gpu")
def test_a_server_switches_the_loras_of_both_transformers(ranks: Pool, folder: Path, tmp_path: Path) -> None:
    files = written(tmp_path, {"high": lightning(1), "low": lightning(2), "style": trained(3)})
    style = files["style"]
    pair, none = theirs(folder, files["high"], files["low"]), theirs(folder, None, None)
    truths = [pair, none, theirs(folder, None, style), pair, theirs(folder, style, None)]
    assert min(abs(a - b).max() for a, b in pairwise(truths)) > 100 * TOLERANCE
    for world in (1, 2):
        for videos in ranks.run(world, switching, str(folder), str(tmp_path)):
            for video, truth in zip(videos, truths, strict=True):
                assert abs(video - truth).max() < TOLERANCE
            assert np.array_equal(videos[0], videos[3])


SMALL = {
    f"transformer.blocks.0.attn1.to_q.lora_{key}.weight": 0.3 * random(shape, 1)
    for key, shape in (("A", (2, 60)), ("B", (60, 2)))
}
MODELS = {
    name: (THEIRS.WanTransformer3DModel, pipelines.wan().transformer.config)
    for name in ("transformer", "transformer_2")
}


def placed(file: Path, text: str = "", transformers: int = 2) -> list[str | None]:
    """Return the transformers that a file is for."""
    named = parse(f"{file}{text}")
    return [each.transformer for each in check([named], THEIRS.WanPipeline, dict(list(MODELS.items())[:transformers]))]


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
    files = written(
        tmp_path, {"style": SMALL, "second": {key.replace("former.", "former_2."): x for key, x in SMALL.items()}}
    )
    with pytest.raises(ValueError, match=r"WanPipeline has no transformer_2; its transformers: transformer$"):
        placed(files["style"], "@transformer_2", transformers=1)
    with pytest.raises(ValueError, match=r"has no unet; its transformers: transformer, transformer_2"):
        placed(files["style"], ":1@unet")
    with pytest.raises(ValueError, match=r"its keys are those of transformer_2; leave the @ out"):
        placed(files["second"], "@transformer")
    with pytest.raises(ValueError, match=r"with the key transformer_2\.blocks"):
        placed(files["second"], transformers=1)
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
    file = written(tmp_path, {"high": {**musubi(1), key: value}})["high"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("diffusers reads the file")

    monkeypatch.setattr(THEIRS.WanPipeline, "lora_state_dict", refuse)
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        placed(file)
    assert f"--lora {file}: {key}" in str(told.value)


@pytest.mark.usefixtures("no_gpu")
def test_float8_is_taken_as_diffusers_takes_it(folder: Path, tmp_path: Path) -> None:
    small = {key: x.to(torch.float8_e4m3fn) for key, x in peft(1).items()}
    file = written(tmp_path, {"high": small})["high"]
    truth = theirs(folder, file, None)
    assert abs(ours(0, 1, torch.device("cpu"), str(folder), (str(file),), merged=True) - truth).max() < TOLERANCE


@pytest.mark.usefixtures("no_gpu")
def test_rank_0_prints_where_each_file_goes_and_what_diffusers_leaves_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, value = "diffusion_model.blocks.1.norm3.diff", torch.ones(60)
    files = written(tmp_path, {"high": distilled(1), "low": {**distilled(2), key: value}})
    high, low = str(files["high"]), f"{files['low']}:0.5"
    video = ours(0, 1, torch.device("cpu"), str(folder), (high, low), merged=False)
    assert abs(video - theirs(folder, files["high"], files["low"], scales=(1.0, 0.5))).max() < TOLERANCE
    told = [line for line in capsys.readouterr().out.splitlines() if "LoRA" in line]
    assert told == [
        f"seqpar: LoRA {high} changes transformer",
        f"seqpar: LoRA {files['low']} changes transformer_2",
        f"seqpar: LoRA {files['low']}: 1 differences of norms are left out, as diffusers leaves them out",
    ]
    request = GenerationRequest(
        str(folder), torch.float64, prompts=("a red cat",), loras=tuple(map(parse, (high, low)))
    )
    job = Source.locate(folder).check(request)
    assert [str(each) for each in job.request.loras] == [
        f"{high}:1@transformer",
        f"{low}@transformer_2",
    ]  # in the summary


def test_a_conversion_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before = written(tmp_path, {"high": SMALL})["high"], threading.active_count()

    def endless(*_: object, **__: object) -> None:
        while True:
            pass

    monkeypatch.setattr(THEIRS.WanPipeline, "lora_state_dict", endless)
    monkeypatch.setattr(lora, "CONVERSION_S", 0.2)
    with pytest.raises(
        ValueError, match=r"high.safetensors, which WanPipeline cannot read: .* did not end within 0\.2 s"
    ):
        placed(file)
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
