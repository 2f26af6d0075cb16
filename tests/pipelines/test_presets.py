"""Presets of distilled models: the authors' sigmas, one call of the transformer a step, and what says how to use them.

The authors' numbers are from their own code or pages, named beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import seqpar
from seqpar.cli.args import Args
from seqpar.families import Preset
from seqpar.families._find import PIPELINES, presets
from seqpar.families._modular import hide_bars, is_modular, parameters_of
from seqpar.loading.lora import Lora, why_preset
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source
from seqpar.pipelines.load import set_preset
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.transformer.parallelize import call_of
from tests.cli.loras import of_wan, written
from tests.cli.runs import refused, shown
from tests.support import modular, pipelines
from tests.support.meshes import random
from tests.support.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gpu")]
THEIRS: Any = diffusers
TOLERANCE = 5e-5  # of pixels: the pipeline keeps latents in fp32
A = {"prompt": "a red cat", "max_sequence_length": 16}
EMBEDDED = {"prompt_embeds": random((1, 9, pipelines.WIDTH), 1), "height": 32, "width": 32}
SMALL = {"height": 32, "width": 32}
VIDEO = {"height": 32, "width": 64, "num_frames": 5}
PICTURE = Image.linear_gradient("L").convert("RGB").resize((64, 32))


def lightning(steps: int) -> list[float]:
    """github.com/ModelTC/Qwen-Image-Lightning, generate_with_diffusers.py: its `scheduler_config`."""
    config = {"base_shift": log(3), "max_shift": log(3), "shift_terminal": None, "use_dynamic_shifting": True}
    scheduler = THEIRS.FlowMatchEulerDiscreteScheduler.from_config({**config, "time_shift_type": "exponential"})
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=log(3))
    return scheduler.sigmas[:-1].tolist()


def klein(tokens: int, steps: int) -> list[float]:
    """github.com/black-forest-labs/flux2, src/flux2/sampling.py: `get_schedule` of up to 4300 tokens."""
    few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    slope = (many - few) / 190
    mu = slope * steps + many - 200 * slope
    return [exp(mu) / (exp(mu) + 1 / t - 1) for t in np.linspace(1, 0, steps + 1)[:-1]]


# github.com/ModelTC/Wan2.2-Lightning, wan/utils/fm_solvers_euler.py: `EulerScheduler` of 4 steps with shift 5; also the
# timesteps 1000, 937.5, 833.3, 625 that github.com/ModelTC/LightX2V takes, `WanStepDistillScheduler`
WAN = [1.0, 0.9375, 0.8333333, 0.625]
# github.com/Lightricks/LTX-Video, configs/ltxv-13b-0.9.8-distilled.yaml: `first_pass.timesteps`
LTX = [1.0, 0.9937, 0.9875, 0.9812, 0.9750, 0.9094, 0.7250]
# github.com/Lightricks/LTX-2, packages/ltx-pipelines/src/ltx_pipelines/utils/constants.py: `DISTILLED_SIGMA_VALUES`
LTX2 = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
# github.com/Tongyi-MAI/Z-Image, src/zimage/scheduler.py with inference.py's 8 steps, shift 3 and sigma_min 0
TURBO = [1.0, 0.9545455, 0.9, 0.8333333, 0.75, 0.6428571, 0.5, 0.3]
EIGHTHS = [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]  # FLUX.1's own of 8 steps, without a shift
ROWS: list[tuple[str, str, Any, Sequence[float]]] = [
    ("wan22", "lightning-4", {**A, **VIDEO}, WAN),
    ("wan", "lightning-4", {**A, **VIDEO}, WAN),
    ("wan_i2v", "lightning-4", {"prompt": "a red cat", **VIDEO, "image": PICTURE}, WAN),
    ("qwen_image", "lightning-4", EMBEDDED, lightning(4)),
    ("qwen_image", "lightning-8", EMBEDDED, lightning(8)),
    ("flux", "turbo-8", {**A, **SMALL}, EIGHTHS),
    ("flux", "hyper-8", {**A, **SMALL}, EIGHTHS),
    ("flux", "hyper-16", {**A, **SMALL}, np.linspace(1, 1 / 16, 16).tolist()),
    ("klein", "distilled", {"prompt": "a red cat", **SMALL}, klein(64, 4)),
    ("ltx", "distilled", {**A, **VIDEO}, LTX),
    ("ltx_condition", "distilled", {**A, **VIDEO}, LTX),
    ("ltx2", "distilled", {**pipelines.LTX2_TEXTS, **VIDEO}, LTX2),
    ("z_image", "turbo-8", {**SMALL, "prompt_embeds": [random((9, pipelines.WIDTH), 1)]}, TURBO),
    ("qwen_image_modular", "lightning-4", {"prompt": "a red cat", **SMALL}, lightning(4)),
    ("flux_modular", "turbo-8", {**A, **SMALL}, EIGHTHS),
    ("z_image_modular", "turbo-8", {**A, **SMALL}, TURBO),
]
Calls = list[tuple[str, int, float]]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


VARIANTS: dict[str, Callable[[], Any]] = {
    "wan22": lambda: pipelines.wan(2),
    "klein": pipelines.flux2_klein,
    **{f"{name}_modular": getattr(modular, name) for name in ("qwen_image", "flux", "z_image")},
    "ltx_condition": lambda: THEIRS.LTXConditionPipeline(**pipelines.ltx().components),  # of distilled checkpoints
}


def pipeline(name: str) -> Any:
    pipe = VARIANTS[name]() if name in VARIANTS else getattr(pipelines, name)()
    if name == "klein":
        pipe.scheduler = pipelines.flow(use_dynamic_shifting=True)
    if name == "z_image_modular":
        pipe.scheduler = pipelines.flow(shift=3.0)
    return pipe


def preset_of(pipe: Any, name: str) -> Preset:
    return presets(type(pipe).__name__, {"_class_name": type(pipe).__name__, **pipe.config})[name]


def called(pipe: Any, arguments: dict[str, Any]) -> Calls:
    """Return the calls of a pipeline's transformers: name, batch rows, and the scheduler's timestep."""
    calls: Calls = []

    def look(name: str, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        x: Any = next((kwargs[name] for name in ("hidden_states", "x") if name in kwargs), args[0] if args else None)
        calls.append((name, len(x), float(pipe.scheduler.timesteps[pipe.scheduler.step_index or 0])))

    hooks = [
        model.register_forward_pre_hook(partial(look, name), with_kwargs=True)
        for name in ("transformer", "transformer_2")
        if (model := getattr(pipe, name, None)) is not None
    ]
    output = "latent" if "ltx2" in type(pipe).__module__ else "np"
    hide_bars(pipe)
    pipe(**arguments, generator=pipelines.seeded(3), output_type=output)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(("name", "preset", "arguments", "sigmas"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_a_preset_has_its_authors_sigmas_and_one_call_a_step(
    name: str, preset: str, arguments: dict[str, Any], sigmas: Sequence[float]
) -> None:
    pipe = seqpar.parallelize(pipeline(name), Mesh.single())
    set_preset(pipe, preset_of(pipe, preset))
    calls, scheduler = called(pipe, arguments), pipe.scheduler
    assert scheduler.sigmas.tolist() == pytest.approx([*sigmas, 0.0], abs=1e-6)
    assert scheduler.timesteps.tolist() == pytest.approx([1000 * x for x in sigmas], abs=1e-3)
    early = 2 if name == "wan22" else len(sigmas)  # two steps of each expert
    models = ["transformer"] * early + ["transformer_2"] * (len(sigmas) - early)
    assert [call[:2] for call in calls] == [(model, 1) for model in models]
    assert [call[2] for call in calls] == pytest.approx([1000 * x for x in sigmas], abs=1e-3)
    seqpar.release(pipe)


def test_negative_control_without_it_the_steps_and_calls_are_others() -> None:
    """As the pipeline's own scheduler with shift 5 spaces four steps, with both branches of guidance."""
    pipe = seqpar.parallelize(pipeline("wan22"), Mesh.single())
    pipe.scheduler = pipelines.flow(shift=5.0)
    calls = called(pipe, {**A, **VIDEO, "num_inference_steps": 4})
    assert pipe.scheduler.sigmas.tolist() == pytest.approx([1.0, 0.91, 0.72, 0.02, 0.0], abs=0.006)
    assert [name for name, *_ in calls] == ["transformer"] * 4 + ["transformer_2"] * 4
    sound = seqpar.parallelize(pipeline("ltx2"), Mesh.single())
    more = called(sound, {**pipelines.LTX2_TEXTS, **VIDEO, "num_inference_steps": 1, "guidance_scale": 1.0})
    assert [rows for _, rows, _ in more] == [2, 1, 1]  # of the sound's guidance, and of the two other kinds


def test_the_experts_of_texts_and_of_pictures_have_two_steps_each() -> None:
    (preset,) = presets("WanImageToVideoPipeline", {}).values()
    for boundary in (0.875, 0.9):  # of Wan2.2-T2V-A14B and I2V-A14B: wan/configs of github.com/Wan-Video/Wan2.2
        assert [sigma >= boundary for sigma in preset.sigmas] == [True, True, False, False]


def loaded(rank: int, world: int, device: torch.device, path: Path, preset: str | None) -> tuple[int, Calls, Any]:
    """The cfg axis of a pipeline by default, the calls of one run, and its frames."""
    pipe: Any = seqpar.load(path, dtype=torch.float64, preset=preset)
    calls = called(pipe, {**A, **VIDEO, **({} if preset else {"num_inference_steps": 1})})
    made = pipe(**A, **VIDEO, generator=pipelines.seeded(3), output_type="np").frames[0] if preset else None
    call = call_of(pipe.transformer)
    assert call is not None
    if preset is not None:
        with pytest.raises(ValueError, match="got 6 steps, expected the 4 of the preset; leave the number out"):
            pipe(**A, **VIDEO, num_inference_steps=6)
        assert type(pipe).__name__ == "WanPipeline"
        assert isinstance(pipe, THEIRS.WanPipeline)
        assert len(called(pipe, {**A, **VIDEO, "guidance_scale": 3.0})) == 8  # a value of the call's own
    seqpar.release(pipe)
    return call.mesh.cfg.size, calls, made


def authors(path: Path) -> np.ndarray:
    """The frames of diffusers alone at the authors' sigmas."""
    pipe = pipelines.quiet(THEIRS.WanPipeline.from_pretrained(path, torch_dtype=torch.float64))
    own = pipe.scheduler.set_timesteps
    pipe.scheduler.set_timesteps = lambda count, device: own(sigmas=WAN, device=device)
    made = pipe(
        **A, **VIDEO, num_inference_steps=4, guidance_scale=1.0, generator=pipelines.seeded(3), output_type="np"
    )
    return made.frames[0]


@pytest.fixture(scope="module")
def wan22(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wan22")
    pipeline("wan22").save_pretrained(path)
    return path


def test_a_loaded_pipeline_has_them_by_default_and_no_axis_for_a_second_branch(ranks: Pool, wan22: Path) -> None:
    truth = authors(wan22)
    for cfg, calls, made in ranks.run(2, loaded, wan22, "lightning-4"):
        assert cfg == 1
        assert [name for name, *_ in calls] == ["transformer"] * 2 + ["transformer_2"] * 2
        assert abs(made - truth).max() < TOLERANCE
    assert [found[0] for found in ranks.run(2, loaded, wan22, None)] == [2, 2]  # a negative control


def test_the_command_samples_a_pair_and_names_what_is_missing(ranks: Pool, wan22: Path, tmp_path: Path) -> None:
    names = {"wan22_high_noise_4steps": of_wan("lightning", 1), "wan22_low_noise_4steps": of_wan("lightning", 2)}
    pair = tuple(map(str, written(tmp_path, names).values()))
    small: Any = {"prompt": ("a red cat",), "frames": 5, "size": "32x64", "dtype": "fp32"}
    plain = Args(str(wan22), **small, lora=pair, out=tmp_path / "x.mp4")
    (out, _), silent = ranks.run(2, shown, replace(plain, preset="lightning-4"))
    assert "\npreset    lightning-4: 4 steps, sigmas 1, 0.9375, 0.8333, 0.625, guidance_scale 1\n" in out
    assert "4 steps of FlowMatchFixedSigmas in WanPipeline, guidance 1\n" in out
    assert "cfg" not in next(line for line in out.splitlines() if line.startswith("mesh"))
    assert "distilled" not in out
    assert silent == ("", "")
    (out, _), _ = ranks.run(2, shown, replace(plain, steps=1))
    lines = [line for line in out.splitlines() if "is distilled" in line]
    assert lines == [
        f"seqpar: LoRA {file} is distilled; its results need preset lightning-4 (4 steps, sigmas 1, 0.9375, 0.8333, "
        f"0.625, guidance_scale 1)"
        for file in pair
    ]
    assert "cfg 2" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"preset": "lightning-8"}, "--preset lightning-8 with --model {}: the presets of WanPipeline are lightning-4"),
        ({"preset": "lightning-4", "steps": 4}, "got --steps 4 with --preset lightning-4; leave one of them out"),
        ({"preset": "lightning-4", "scheduler": "X"}, "got --scheduler X with --preset lightning-4; leave one of"),
        ({"preset": "lightning-4", "min_psnr": 9.0}, "got --min-psnr 9.0 with --preset lightning-4; leave one of"),
        ({"preset": "lightning-4", "model": "builtin"}, "--preset lightning-4 with --model builtin: this model has no"),
        (
            {"preset": "a", "model": "random:unidiffuser-v1"},
            "--preset a with --model random:unidiffuser-v1: this model",
        ),
        (
            {"preset": "turbo-8", "model": "random:FLUX.1-schnell"},
            "FLUX.1-schnell: it sets guidance as an input, which",
        ),
        ({"preset": "lightning-4", "model": "random:FLUX.1-dev"}, "presets of FluxPipeline are turbo-8, hyper-8, hyp"),
    ],
)
def test_what_is_no_preset_is_refused_with_those_there_are(
    wan22: Path, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    model = flags.pop("model", wan22)
    prompt = () if model == "builtin" else ("a red cat",)
    flags = {"steps": None, "size": None, "prompt": prompt, **flags}
    assert message.format(model) in refused(model, tmp_path / "x.mp4", **flags)


def test_python_refuses_it_before_weights_load(wan22: Path) -> None:
    settings: Any
    for settings, message in (
        ({"preset": "turbo-8"}, "got preset='turbo-8', but the presets of WanPipeline are lightning-4"),
        ({"preset": "lightning-4", "mesh": "cfg=2"}, "cfg=False contradicts a mesh with cfg=2"),
        ({"preset": "lightning-4", "precision": "fp8", "min_psnr": 30.0}, "got min_psnr= with preset="),
    ):
        with pytest.raises(ValueError, match=message):
            seqpar.load(wan22, **settings)


def test_a_plan_has_one_branch_and_the_steps_of_the_preset(wan22: Path) -> None:
    request = GenerationRequest(str(wan22), torch.float32, prompts=("a red cat",))
    plain, few = (Source.locate(wan22).check(replace(request, preset=name)) for name in (None, "lightning-4"))
    assert (plain.load.labels, plain.steps, plain.guidance.on) == (2, 25, True)
    assert (few.load.labels, few.steps, few.load.steps, few.guidance.on) == (1, 4, 4, False)
    own = Source.locate(wan22).check(replace(request, preset="lightning-4", guidance=2.0))
    assert (own.load.labels, own.arguments["guidance_scale"]) == (2, 2.0)


SEKO = "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors"
FILES = [  # as their authors name them
    ("WanPipeline", SEKO, "lightning-4"),
    ("WanPipeline", "wan2.2_t2v_A14b_low_noise_lora_rank64_lightx2v_4step_1217.safetensors", "lightning-4"),
    ("WanPipeline", "Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank64.safetensors", "lightning-4"),
    ("WanPipeline", "wan_14steps_style.safetensors", None),
    ("QwenImagePipeline", "Qwen-Image-Lightning-4steps-V2.0.safetensors", "lightning-4"),
    ("QwenImagePipeline", "Qwen-Image-Lightning-8steps-V1.1-bf16.safetensors", "lightning-8"),
    ("QwenImageEditPlusPipeline", "Qwen-Image-Edit-2509-Lightning-8steps-V1.0-fp32.safetensors", "lightning-8"),
    ("QwenImagePipeline", "style.safetensors", None),
    ("FluxPipeline", "FLUX.1-Turbo-Alpha/diffusion_pytorch_model.safetensors", "turbo-8"),
    ("FluxPipeline", "Hyper-FLUX.1-dev-8steps-lora.safetensors", "hyper-8"),
    ("FluxImg2ImgPipeline", "Hyper-FLUX.1-dev-16steps-lora.safetensors", "hyper-16"),
    ("LTXPipeline", "ltxv-13b-0.9.8-distilled-lora128.safetensors", "distilled"),
    ("LTX2Pipeline", "ltx-2-19b-distilled-lora-384.safetensors", "distilled"),
    ("FluxKontextPipeline", "FLUX.1-Turbo-Alpha.safetensors", None),
]


@pytest.mark.parametrize(("kind", "file", "name"), FILES)
def test_a_distilled_lora_is_known_by_its_path(kind: str, file: str, name: str | None) -> None:
    known = presets(kind, {})
    lora = Lora(f"/models/{file}", known[name].scale if name else 1.0)
    said = why_preset(lora, known, None)
    assert (said is None) if name is None else f"need preset {name} (" in str(said)
    assert why_preset(lora, known, name) is None
    if name and known[name].scale != 1:
        assert "with the LoRA scaled by 0.125)" in str(why_preset(replace(lora, scale=1.0), known, name))


def test_presets_have_names_of_their_own_and_arguments_that_the_pipelines_take() -> None:
    every = [preset for facts in PIPELINES for preset in facts.presets]
    needed = dict(preset.needs for preset in every if preset.needs)
    for kind in (x for x in dir(THEIRS) if x.endswith("Pipeline")):
        known = presets(kind, needed)
        assert len(known) == sum(preset.fits(kind, needed) for preset in every), kind
        klass = getattr(THEIRS, kind)
        taken = parameters_of(klass() if is_modular(klass) else klass) if known else {}
        assert all({"num_inference_steps", *preset.arguments} <= taken.keys() for preset in known.values()), kind
    assert not presets("Flux2KleinPipeline", {"is_distilled": False})
    assert not presets("LTX2Pipeline", {"duration_head": ["diffusers", "LTX2DurationHead"]})  # LTX-2.5
