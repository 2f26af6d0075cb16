"""A mistake in the flags is one sentence before weights load, the same on every rank, and nothing is written.

`test_ranks.py` tests how processes end then; `test_bad_folders.py` has what is wrong in files.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

import seqpar.local
from seqpar.cli import job as decoding
from seqpar.cli.args import Args, ProfileArgs
from seqpar.cli.job import check, parse_size
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.loop.blueprint import Blueprint
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.own_loop import OwnJob
from seqpar.planner.plan import parse_mesh
from seqpar.types.plugins import plugins
from tests.support.meshes import LAYOUTS
from tests.support.pool import Pool

PICTURE = str(Path(__file__).parents[2] / "docs" / "builtin.png")
OTHER = str(Path(PICTURE).with_name("comfyui.webp"))  # of another size
READ = "weights are read"
A: dict[str, Any] = {"prompt": ("a",)}
FOLLOWS = {"controlnet": "no-such-net", "control_image": PICTURE}
NO_LORA = "LoRAs need the folder of a diffusers pipeline for prompts"


class ReadError(Exception):
    """Flags have passed all checks: weights would be read now."""


def told(rank: int, world: int, device: torch.device, args: Args) -> tuple[str, str]:
    """The error in which a run ends before weights are read, and what was printed before it."""

    def read(*_: object, **__: object) -> None:
        raise ReadError

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(Blueprint, "build", read)
        patch.setattr(DiffusionPipeline, "from_pretrained", read)
        try:
            run(args)
        except ValueError as error:
            return str(error), printed.getvalue()
        except ReadError:
            return READ, printed.getvalue()
    return "pictures were made", printed.getvalue()


def named(value: Any) -> str | None:
    if isinstance(value, dict):
        return " ".join(f"{name}={str(each)[:20]}" for name, each in value.items()) or "nothing"
    return None


# of the built-in model, on one rank
FLAGS = [
    ({"seed": -1}, "got --seed=-1, expected a whole number from 0 to 9223372036854775807"),
    ({"seed": 2**63}, "got --seed=9223372036854775808"),
    ({"guidance": 1.0, "guidance_channels": 3}, "--guidance-channels 3 needs guidance over 1, got --guidance 1"),
    ({"guidance_channels": 5}, "got guidance on 5 channels"),
    ({"eta": 2.0}, "got eta 2, expected 0"),
    ({"eta": 0.5, "scheduler": "EulerDiscreteScheduler"}, "this scheduler has no eta"),
    ({"scheduler": "PNDMScheduler", "steps": 3}, "got 3 steps, which PNDMScheduler cannot do"),
    ({"scheduler": ""}, "got scheduler '', expected one of diffusers'"),
    ({"scheduler": "Eulr"}, "expected one of diffusers': EDMEulerScheduler, EulerDiscreteScheduler"),
    ({"scheduler": "unipc"}, "got scheduler 'unipc', expected one of diffusers': UniPCMultistepScheduler"),
    ({"steps": 1001}, "got 1001 steps, expected 1 to 1000"),
    ({"steps": 10**9}, "got --steps=1000000000, expected a whole number from 1 to 100000"),
    ({"respacing": "ddim300"}, "got respacing 'ddim300', expected a number that an integer stride"),
    ({"respacing": "25", "scheduler": "LCMScheduler"}, "got respacing '25' with LCMScheduler, expected DDIM"),
    ({"repeat": 0}, "got --repeat=0, expected"),
    ({"repeat": 10**9}, "got --repeat=1000000000, expected a whole number from 1 to 65536"),
    ({"repeat": 40_000, "classes": ("1", "2")}, "got 2 x --repeat 40000 pictures"),
    ({"dry_run": (10**9,)}, "got GPUs to plan for=1000000000, expected a whole number from 1 to 512"),
    ({"dry_run": (1,) * 10**6}, "got plans for 1000000 GPUs together, expected at most 1024"),
    ({"dry_run": (2,), "strategy": "foo"}, "got strategy 'foo'"),
    ({"dry_run": (2,), "transport": "nccl"}, "got transport 'nccl'"),
    ({"dry_run": (2,), "local": "foo"}, "got local attention 'foo'"),
    ({"dry_run": (2,), "exact": True, "mesh": "ring=2"}, "with ring=2"),
    ({"size": "9" * 5000}, "expected 1 to 131072 pixels along a side"),
    ({"size": "64x131073"}, "got --size 64x131073, expected 1 to 131072"),
    ({"size": "0"}, "got --size 0, expected 1 to 131072"),
    *(({"size": size}, "expected pixels like 256 or 256x384") for size in ("1x2x3", "-5")),
    *(({"mesh": mesh}, "expected axes like cfg=2") for mesh in ("rings=2", "cfg", "", "cfg=-1")),
    ({"mesh": "cfg=2,cfg=1"}, "each axis once: cfg is there twice"),
    ({"frames": 0}, "got --frames=0, expected"),
    ({"fps": 10**9}, "got --fps=1000000000, expected"),
    ({"prompt": ("a",), "classes": ("7",)}, "--prompt a with --model builtin: this model generates images of classes"),
    ({"model": "builtin-text", "classes": ("7",)}, "--classes 7 with --model builtin-text: FluxPipeline takes prompts"),
    ({"lora": ("style",)}, NO_LORA),
    ({"precision": "fp8", "model": "random:unidiffuser-v0", "dry_run": (2,), **A}, "this model has no blocks th"),
    ({"precision": "fp8", "model": "random:FLUX.1-dev", "dry_run": (2,), "dtype": "fp16", **A}, "weights are float16"),
    ({"local": "fp8"}, "local attention fp8 is for transformers of diffusers, which a calibration centres"),
    ({"local": "fp8", "dry_run": (2,)}, "local attention fp8 is for transformers of diffusers"),
    ({"local": "fp8", "verify": True}, "got --verify with --local-attention fp8, whose error it would report"),
    ({"precision": "fp8", "verify": True}, "got --verify with --precision fp8, whose error it would report"),
    ({"cache": "dbcache"}, "--cache dbcache with --model builtin: the loop of seqpar's own models has no step cache"),
    (
        {"cache": "dbcache:heads=2", "model": "builtin-text", **A},
        "got 'heads=2' for a step cache, expected NAME=NUMBER",
    ),
    ({"cache": "dbcache:head=4", "model": "builtin-text", **A}, "--cache dbcache:head=4 with --model builtin-text: "),
    ({"model": "large-dit-3b", "lora": ("style",), "dry_run": (2,)}, NO_LORA),
    ({"model": "random:FLUX.1-dev", "lora": ("style",), **A}, NO_LORA),
    ({"mask": PICTURE}, f"got --mask {PICTURE} with 0 pictures; add one --image, which it repaints"),
    ({"mask": PICTURE, "image": (PICTURE,) * 2}, "with 2 pictures; add one --image"),
    ({"image": (PICTURE,) * 17}, "got --image with 17 pictures, expected at most 16"),
    ({"control_image": PICTURE}, "--controlnet and --control-image need each other; add --controlnet"),
    ({"controlnet": "pose"}, "--controlnet and --control-image need each other; add --control-image"),
    ({"control_scale": 1.0}, "got --control-scale 1 without --controlnet; add one, or leave it out"),
    *(({**FOLLOWS, "control_scale": scale}, "expected 0 to 10") for scale in (-1.0, 10.5, float("nan"))),
    (
        {"mask": PICTURE, "image": (PICTURE,)},
        f"--image {PICTURE} with --model builtin: this model takes no input image",
    ),
    ({"profile_steps": 4, "steps": 4}, "got a run of 4 steps, expected at least 5: 1 to warm up, 4 to measure; change"),
    ({"profile_steps": 0}, "got --profile-steps=0, expected a whole number from 1 to 100"),
    ({"profile_steps": 4, "transport": "peer"}, "got --transport peer on CPUs, expected another one for a profile"),
    ({"profile_out": Path(__file__)}, f"got output {__file__}/profile.txt, which cannot be written: Not a"),
]
# of a model of classes, on two ranks
ON_RANKS = [
    ({"model": "nothing-there"}, "got model 'nothing-there': there is no such path; known models: "),
    ({"strategy": "ulises"}, f"got strategy 'ulises', expected one of {', '.join(sorted(LAYOUTS))}"),
    ({"local": "flush"}, f"got local attention 'flush', expected one of {', '.join(plugins(seqpar.local))}"),
    ({"size": "100"}, "got size 100x100, expected multiples of 16"),
    ({"size": "16"}, "1 tokens cannot be sharded over 2 ranks"),
    ({"guidance": 1.0, "mesh": "cfg=2"}, "got cfg=2 with guidance 1.0, expected guidance > 1"),
    ({"image": ("no.png",)}, "got --image no.png, which cannot be read: No such file or directory; name a picture"),
    ({"out": Path("/proc/nowhere/x.png")}, "got output /proc/nowhere/x.png, which cannot be written"),
    ({"model": "dit-xl/2", "size": "131072", "mesh": "auto"}, "the run does not fit: its smallest layout"),  # terabytes
]
# of a pipeline's folder
OF_PROMPTS = [
    ("flux", {}, "needs --prompt: FluxPipeline takes prompts"),
    ("flux", {**A, "classes": ("1",)}, "--classes 1 with --model"),
    ("flux", {**A, "size": "24x30"}, "got size 24x30, expected multiples of 4 (patch 2 x decoder 2)"),
    ("flux", {**A, "negative_prompt": "b"}, "--negative-prompt b with"),
    ("flux", {**A, "frames": 5}, "FluxPipeline generates images, no videos"),
    ("flux", {**A, "guidance_channels": 3}, "diffusers' loop has no such setting"),
    ("flux", {**A, "respacing": "25"}, "only models of classes take it"),
    ("flux", {**A, "mesh": "cfg=2"}, "got cfg=2 with guidance 1.0, expected guidance > 1"),
    ("flux", {**A, "scheduler": "DDIMScheduler"}, "got scheduler 'DDIMScheduler' of diffusion by"),
    ("flux", {**A, "scheduler": "FlowMatchHeunDiscreteScheduler"}, "expected one of flow matching that takes sigmas"),
    ("schnell", {**A, "guidance": 3.5}, "of this FluxPipeline takes no scale as an input; use --true-guidance"),
    ("sd3", {**A, "true_guidance": 2.0}, "StableDiffusion3Pipeline takes no true_cfg_scale"),
    (
        "hunyuan_video15",
        {**A, "size": None, "dry_run": ()},
        "no plan: the files of HunyuanVideo15Pipeline do not state its number of tokens; add --size and --frames",
    ),
    ("wan", A, "expected a name that ends in .mp4"),
    ("wan", {**A, "frames": 7}, "got --frames 7, expected 1 more than a multiple of 4, such as 5"),
    ("wan", {**A, "image": (PICTURE,)}, "WanPipeline takes no input image"),
    ("flux", {**A, "image": (PICTURE,), "strength": 2.0}, "got --strength 2.0, expected 0.001 to 1"),
    ("flux", {**A, "image": (PICTURE,), "mask": OTHER}, f"got --mask {OTHER} of "),
    ("flux", {**A, "image": (PICTURE,), "mask": "no.png"}, "got --mask no.png, which cannot be read: No such file"),
    ("wan", {**A, "image": (PICTURE,), "mask": PICTURE}, "no pipeline like WanPipeline takes image and mask_image"),
    ("flux", {**A, **FOLLOWS}, "got ControlNet 'no-such-net': there is no such path"),
    ("flux", {**A, **FOLLOWS, "controlnet": ""}, "got ControlNet '': there is no such path"),
    ("flux", {**A, **FOLLOWS, "controlnet": "x" * 300}, "xxx...': there is no such path"),
    ("flux", {**A, **FOLLOWS, "control_image": "no.png"}, "got --control-image no.png, which cannot be read"),
    (
        "flux",
        {**A, **FOLLOWS, "controlnet": "transformer"},
        "FluxTransformer2DModel, expected a ControlNet of diffusers",
    ),
    ("sd3", {**A, **FOLLOWS, "controlnet": "pose"}, "does not fit: StableDiffusion3ControlNetPipeline takes no Flux"),
    (
        "pixart",
        {**A, **FOLLOWS, "controlnet": "pose"},
        "does not fit: no pipeline like PixArtAlphaPipeline takes a Con",
    ),
    ("unidiffuser", {**A, **FOLLOWS, "controlnet": "pose"}, "does not fit: this model takes none"),
    ("flux", {**A, "lora": ("nothing",)}, "got --lora nothing, expected a .safetensors file that exists"),
    ("flux", {**A, "lora": ("bin",)}, "style.bin, expected a .safetensors file that exists"),
    ("flux", {**A, "lora": ("cut",)}, "is truncated or not a safetensors file"),
    ("flux", {**A, "lora": ("style:nan",)}, "expected a finite scale, such as 0.8"),
    ("flux", {**A, "lora": ("style:much",)}, "style.safetensors:much, expected a .safetensors file that exists"),
    ("flux", {**A, "lora": ("sd3",)}, "expected each of its 6 keys in a FluxTransformer2DModel and no others"),
    ("sd3", {**A, "lora": ("other",)}, "which does not fit: expected each of its"),
    ("flux", {**A, "lora": ("wide",)}, "which does not fit the FluxTransformer2DModel: "),
    ("flux", {**A, "lora": ("unknown",)}, "with nothing.lora_A.weight, which does not fit"),
    ("flux", {**A, "lora": ("elsewhere",)}, "with the key unet.nothing.lora_A.weight, expected a LoRA of a Flux"),
    ("pixart", {**A, "lora": ("style",)}, "diffusers' PixArtAlphaPipeline loads no LoRA of a transformer"),
    ("unidiffuser", {}, "needs --prompt: it generates images from prompts"),
    ("unidiffuser", {"classes": ("1",)}, "--classes 1 with --model"),
    ("unidiffuser", {**A, "negative_prompt": "b"}, "the unconditional branch takes noise as its text"),
    ("unidiffuser", {**A, "true_guidance": 2.0}, "--guidance is classifier-free for this model"),
    ("unidiffuser", {**A, "size": "14"}, "got size 14x14, expected multiples of 4 (patch 2 x decoder 2)"),
    ("unidiffuser", {**A, "guidance": 1.0, "mesh": "cfg=2"}, "got cfg=2 with guidance 1.0, expected guidance > 1"),
    ("unidiffuser", {**A, "lora": ("style",)}, NO_LORA),
    ("unidiffuser", {**A, "precision": "fp8"}, "this model has no blocks that compute in 8 bits"),
    ("pixart", {**A, "precision": "fp8"}, ": PixArtTransformer2DModel has no blocks that compute in 8 bits; known"),
]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=named)
def test_of_the_built_in_model(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    profiles = any(name.startswith("profile") for name in flags)
    profile: dict[str, Any] = {"profile_out": tmp_path / "p"} if profiles else {}
    given: dict[str, Any] = {"out": tmp_path / "new" / "x.png", **profile, **flags}
    started = time.process_time()
    error, printed = told(0, 1, torch.device("cpu"), (ProfileArgs if profiles else Args)(**given))
    assert time.process_time() - started < 5  # whatever the numbers are
    assert message in error
    assert "\n" not in error
    assert printed == ""  # no plan, no bar
    assert not list(tmp_path.iterdir())


def right(folder: Path, out: Path) -> dict[str, Any]:
    return {"model": str(folder), "out": out, "mesh": "ulysses=2", "steps": 2, "size": "64"}


@pytest.mark.parametrize(("flags", "message"), ON_RANKS, ids=named)
def test_of_a_model_of_classes_on_two_ranks(
    ranks: Pool, folder: Path, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    one, other = ranks.run(2, told, Args(**{**right(folder, tmp_path / "x.png"), **flags}))
    assert one == other
    assert one[0].count(message) == 1
    assert one[1] == ""
    assert not list(tmp_path.iterdir())


def test_flash_attention_without_a_gpu_is_refused_and_right_flags_are_not(
    ranks: Pool, folder: Path, tmp_path: Path
) -> None:
    args = Args(**right(folder, tmp_path / "x.png"))
    assert [message for message, _ in ranks.run(2, told, args)] == [READ] * 2  # a negative control
    if ranks.device == "cpu":
        one, other = ranks.run(2, told, replace(args, local="flash"))
        assert one == other
        assert one[0].startswith("got local attention 'flash', which does not work here: needs a GPU")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("name", "flags", "message"), OF_PROMPTS, ids=named)
def test_of_a_pipeline(
    folders: Callable[[str], Path],
    loras: dict[str, Path],
    pose: Path,
    tmp_path: Path,
    name: str,
    flags: dict[str, Any],
    message: str,
) -> None:
    given: dict[str, Any] = {"steps": 2, "size": "24x32", "out": tmp_path / "x.png", **flags}
    for lora in flags.get("lora", ()):
        file, colon, scale = lora.partition(":")
        given["lora"] = (f"{loras.get(file, file)}{colon}{scale}",)
    nets = {"pose": str(pose), "transformer": str(folders(name) / "transformer")}
    given |= {"controlnet": nets.get(flags["controlnet"], flags["controlnet"])} if "controlnet" in flags else {}
    error, _ = told(0, 1, torch.device("cpu"), Args(str(folders(name)), **given))
    assert message in error
    assert "\n" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hosts 0", "got --hosts=0, expected a whole number from 1 to 512"),
        ("--hosts -1 --gpus 2", "got --hosts=-1, expected a whole number from 1"),
        ("--hosts 2", "--hosts 2 needs the number of all their GPUs; add --gpus, such as --gpus 16"),
        ("--hosts 3 --gpus 8", "got --hosts 3 for 8 GPUs, expected hosts with equally many"),
    ],
)
def test_hosts_of_a_plan(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command(["plan", *flags.split()])
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("no_gpu")
def test_strips_in_exact_mode_and_more_pictures_than_memory_holds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got --vae strips with --exact, expected pictures"):
        check(Args(vae="strips", exact=True), Mesh.single())  # (a run says first that exact mode needs a GPU)
    job = check(Args(out=tmp_path / "x.png"), Mesh.single())
    decoding.check_decoding(job, Mesh.single())
    assert isinstance(job, OwnJob)
    large = replace(job.request, size=(1024, 1024))
    many = replace(job, load=replace(job.load, images=10**6), request=large)
    with pytest.raises(ValueError, match=r"got 1000000 pictures of 1024x1024 pixels, which take 11718\.8 GiB"):
        decoding.check_decoding(many, Mesh.single())


def test_what_is_right_is_read_as_documented() -> None:
    assert [parse_size(text) for text in (None, "256", "64x96")] == [None, (256, 256), (64, 96)]
    assert parse_mesh("auto") == ("latency", {})
    assert parse_mesh("throughput") == ("throughput", {})
    assert parse_mesh("cfg=2,ulysses=2") == ("latency", {"cfg": 2, "ulysses": 2})
