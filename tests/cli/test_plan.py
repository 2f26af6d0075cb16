"""`seqpar plan` and `--dry-run` rank every layout and load no weights; a model's name may stand for another one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest

from seqpar.cli.args import Args, PlanArgs
from seqpar.cli.job import as_dry_run, check
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.families._find import CUTS
from seqpar.families._modular import called, is_modular
from seqpar.loading import names
from seqpar.loading.names import PUBLISHED, published_of, short_name
from seqpar.loading.parts import transformers_of
from seqpar.loop.blueprint import Blueprint
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.parallelize import call_of, parallelize
from seqpar.types.flags import parsed
from tests.cli.runs import parameters, pixels, shown
from tests.support import modular, pipelines
from tests.support.meshes import EXACT
from tests.support.pool import Pool

Captured = pytest.CaptureFixture[str]


def dry(*flags: str) -> None:
    run(parsed(Args, ["--dry-run", *flags], "plan"))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", [(), (1, 4)], ids=str)
def test_a_dry_run_ranks_layouts_and_loads_no_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Blueprint, "build", refuse)
    run(Args(model="large-dit-600m", size="1024", classes=("1",), out=tmp_path / "x.png", dry_run=counts))
    tables = capsys.readouterr().out.split("\n\n")[1:]
    assert not list(tmp_path.iterdir())
    assert [table.split(" x ")[0] for table in tables] == ([str(count) for count in counts] or ["1"])
    assert all(("NVIDIA H200" if counts else "CPU") in table for table in tables)
    *rows, counted = tables[-1].splitlines()[2:]
    assert counted.startswith("a step: 10.7 TFLOP, ")
    assert ("the busiest rank sends" in counted) == bool(counts)
    assert len(rows) == (9 if counts else 1)
    assert all("GiB" not in row for row in rows)
    times = [float(row[46:56]) for row in rows]
    assert times[1:] == sorted(times[1:])
    unasked = [time for time, row in zip(times, rows, strict=True) if row.split()[-8] in ("-", *EXACT)]
    assert times[0] <= 1.01 * min(unasked)


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_in_8_bits_counts_faster_gemms_and_copies_of_weights(capsys: Captured, tmp_path: Path) -> None:
    args, found = Args("large-dit-7b", ("1",), size="1024", out=tmp_path / "x.png", dry_run=(1,)), list[list[float]]()
    for asked in (args, replace(args, precision="fp8")):
        run(asked)
        out = capsys.readouterr().out
        assert ("GEMMs in fp8 at 1.7 times" in out) == (asked is not args)
        (row,) = (line for line in out.splitlines() if line.startswith("one rank"))
        found.append([float(number) for number in row.split()[3:]])
    (wide, gemm, *_, gib), (eight, gemm8, *_, gib8) = found
    assert (wide - eight, gib8 - gib) == (pytest.approx(gemm - gemm8, abs=0.02), pytest.approx(6.0, abs=0.1))
    assert 1.6 < gemm / gemm8 < 1.7  # but for the embedder and the final layer


def test_a_dry_run_on_two_processes_prints_once(ranks: Pool, tmp_path: Path) -> None:
    (first, _), (second, _) = ranks.run(2, shown, Args("dit-s/8", size="128", dry_run=(), out=tmp_path / "x.png"))
    assert first.count("\n2 x ") == first.count(": cfg 2, ") == 1
    assert first.count("does not fit") == 0
    assert second == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", ["", "1 4"])
def test_a_plan_prints_what_a_dry_run_prints_and_explains_itself_if_asked(capsys: Captured, counts: str) -> None:
    flags = ["--model", "large-dit-7b" if counts else "dit-xl/2", "--size", "1024", "--classes", "1"]
    gpus = ["--gpus", *counts.split()] if counts else []
    command(["plan", *flags, *gpus])
    plan = capsys.readouterr().out
    assert plan.count("ms per step") >= 2 * max(1, len(counts.split()))  # a plan and the head of a table for each
    assert "\nwhy " not in plan
    command(["sample", *flags, "--dry-run", *counts.split()])
    assert capsys.readouterr().out == plan
    command(["plan", *flags, *gpus, "--explain"])
    explained = capsys.readouterr().out
    assert set(plan.splitlines()) <= set(explained.splitlines())
    assert explained.count("\nwhy one rank:") == 1
    if counts:
        assert explained.count("\nwhy cfg 2 x ulysses 2 by kv_first:") == 1
        assert explained.count("ring 2 x ulysses 2 by usp: +") == 1


@pytest.mark.usefixtures("no_gpu")
def test_what_does_not_fit_is_listed_and_exact_mode_has_no_ring(capsys: Captured) -> None:
    dry("1", "4", "--model", "dit-xl/2", "--classes", "1", "--size", "32768")
    text = capsys.readouterr().out
    assert "1 x NVIDIA H200: nothing fits" in text
    assert "does not fit: needs" in text
    assert "4 x NVIDIA H200: cfg 2 x ulysses 2" in text
    dry("2", "--exact", "--out", "/nowhere/it/could/be.png")  # nothing is written
    text = capsys.readouterr().out
    assert "2 x NVIDIA H200: " in text
    assert "ring" not in text
    dry("2")
    assert "ring" in capsys.readouterr().out  # a negative control


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_folder_is_planned_for_the_tokens_of_the_run(
    capsys: Captured, folders: Callable[[str], Path], name: str
) -> None:
    guided = ["--true-guidance", "2"] if name == "flux" else []
    for size, tokens in (("24x32", 48), ("32x32", 64)):
        dry("2", "--model", str(folders(name)), "--prompt", "x", "--size", size, *guided)
        text = capsys.readouterr().out
        assert f"1 image of {tokens} tokens" in text
        assert "2 x NVIDIA H200: cfg 2, " in text


# Published models, without files ------------------------------------------------------------------------------------

# model -> tokens of its usual result, and how often a step computes them
USUAL = {
    "fal/AuraFlow-v0.3": (4096, 2),
    "briaai/BRIA-3.2": (4096, 2),
    "briaai/FIBO": (4096, 2),
    "lodestones/Chroma1-HD": (4096, 2),
    "THUDM/CogVideoX-5b": (13 * 30 * 45, 2),
    "THUDM/CogVideoX-5b-I2V": (13 * 30 * 45, 2),
    "THUDM/CogView4-6B": (4096, 2),
    "THUDM/CogView3-Plus-3B": (4096, 2),
    "nvidia/Cosmos-1.0-Diffusion-7B-Text2World": (16 * 44 * 80, 2),
    "nvidia/Cosmos-Predict2.5-2B": (24 * 44 * 80, 2),
    "nvidia/Cosmos3-Nano": (48 * 22 * 40, 2),
    "alibaba-pai/EasyAnimateV5.1-12b-zh-diffusers": (13 * 32 * 32, 2),
    "baidu/ERNIE-Image": (4096, 2),
    "black-forest-labs/FLUX.1-dev": (4096, 1),
    "black-forest-labs/FLUX.1-Kontext-dev": (4096, 1),
    "black-forest-labs/FLUX.2-klein-4B": (4096, 1),
    "FLUX.3": (4096, 2),
    "zai-org/GLM-Image": (4096, 2),
    "HiDream-ai/HiDream-I1-Full": (4096, 2),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": (4096, 2),
    "hunyuanvideo-community/HunyuanVideo": (33 * 45 * 80, 1),
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": (31 * 30 * 53, 2),
    "ideogram-ai/ideogram-v4": (128 * 128, 2),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": (31 * 32 * 48, 2),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": (4096, 2),
    "krea/Krea-2-Raw": (4096, 2),
    "krea/Krea-2-Turbo": (4096, 1),
    "meituan-longcat/LongCat-Image": (4096, 2),
    "Lightricks/LTX-Video": (21 * 16 * 22, 2),
    "Lightricks/LTX-2": (16 * 16 * 24, 4),
    "Alpha-VLLM/Lumina-Image-2.0": (4096, 2),
    "MiniMaxAI/MiniMax-H3": (37 * 24 * 42, 1),
    "genmo/mochi-1-preview": (4 * 30 * 53, 2),
    "AIDC-AI/Ovis-Image-7B": (4096, 2),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": (4096, 2),
    "facebook/DiT-XL-2-256": (256, 2),
    "Qwen/Qwen-Image": (4096, 1),
    "Qwen/Qwen-Image-Edit": (2 * 4096, 1),
    "Qwen/Qwen-Image-2.1": (4096, 1),
    "stabilityai/stable-diffusion-3.5-medium": (4096, 2),
    "Skywork/SkyReels-V2-DF-14B-720P-Diffusers": (25 * 34 * 60, 2),
    "stabilityai/stable-audio-open-1.0": (1025, 2),
    "Tongyi-MAI/Z-Image-Turbo": (4096, 2),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": (21 * 30 * 52, 2),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (21 * 30 * 52, 2),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (21 * 15 * 26, 2),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": (21 * 45 * 80, 1),
    "nvidia/ChronoEdit-14B-Diffusers": (2 * 30 * 52, 2),
}


def test_every_family_has_a_usual_result() -> None:
    assert {PUBLISHED[name].transformer for name in USUAL} == {*CUTS}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", USUAL)
def test_a_family_is_planned_by_name_without_files(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their names have short forms; two blocks of each kind do."""
    theirs: Any = diffusers
    known, (id_, _) = PUBLISHED[name], published_of(short_name(name)) or pytest.fail(name)
    defaults = inspect.signature(getattr(theirs, known.transformer).__init__).parameters
    sizes = {key: known.config.get(key, one.default) for key, one in defaults.items()}
    few = {key: 2 for key, size in sizes.items() if type(size) is int and key.endswith(("layers", "blocks"))}
    few = few if "vace_layers" not in sizes else {}  # which names layers
    monkeypatch.setitem(names.PUBLISHED, name, replace(known, config={**known.config, **few}))
    job = check(as_dry_run(PlanArgs(model=short_name(name), card="h100")), Mesh.joined())
    load = job.load
    assert (id_, load.tokens, load.calls * (1 + load.guidance)) == (name, *USUAL[name])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "flux.1-dev"], ["1 x NVIDIA H200: one rank, ", "a step: 74.4 TFLOP"]),
        (["--model", "random:FLUX.1-dev"], ["4096 tokens, guidance 3.5 as an input, bfloat16", "a step: 74.4 TFLOP"]),
        (["--model", "flux.1-dev", "--card", "4090"], ["nothing fits: one rank", "22.5 GiB of 22.3", "fp8: one rank"]),
        (["--model", "ovis-image-7b", "--card", "4090", "--dtype", "fp32"], ["not in 8 bits either: --precision fp8"]),
        (["--model", "flux.1-dev", "--card", "4090", "--precision", "fp8"], [" 11.5\n"]),
        (["--model", "wan2.2-t2v-a14b", "--card", "h100"], [" 59.1\n"]),
        (["--model", "wan2.2-t2v-a14b", "--card", "h100", "--park"], [" 32.5\n"]),
    ],
    ids=" ".join,
)
def test_a_plan_says_what_fits_a_card(capsys: Captured, words: list[str], told: list[str]) -> None:
    command(["plan", *(words if "--card" in words else [*words, "--gpus", "1"])])
    printed = capsys.readouterr().out
    assert all(text in printed for text in told), printed


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--card", "h10"], "got --card h10, expected one of h100, h200, a100, 4090, b200; did you mean h100?"),
        (["--card", "a100", "--precision", "fp8"], "NVIDIA A100 has no products of e4m3"),
        (["--model", "flux.1-dv"], "there is no such path; did you mean black-forest-labs/FLUX.1-dev?"),
    ],
    ids=" ".join,
)
def test_an_unknown_card_or_model_suggests_a_near_one(words: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        command(["plan", "--model", "flux.1-dev", "--card", "h100", *words])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["wan_i2v", "ltx", "minimax_h3", "anima"])
def test_planned_tokens_and_calls_are_those_of_a_run(tmp_path: Path, name: str) -> None:
    pipe = getattr(modular if name in ("minimax_h3", "anima") else pipelines, name)()
    pipelines.quiet(pipe)
    modular.saved(pipe, tmp_path)
    frames = {"wan_i2v": 9, "ltx": 9, "cogvideox": 9}.get(name)
    args = Args(str(tmp_path), prompt=("a",), steps=2, size="32x64", frames=frames, dry_run=(1,), dtype="fp32")
    job: Any = check(args, Mesh.joined())
    module, rows = next(iter(transformers_of(pipe).values())), list[int]()
    parallelize(pipe, vae=False, cfg=False)
    module.register_forward_pre_hook(lambda *given: rows.append(len(given[2]["hidden_states"])), with_kwargs=True)
    called(pipe, job.arguments) if is_modular(pipe) else pipe(**job.arguments)
    call: Any = call_of(module)
    lengths = call.state.lengths
    assert lengths.get("image", sum(lengths.values()) - 414 - 1) == job.load.tokens
    assert sum(rows) == job.steps * job.load.calls * (1 + job.load.guidance)


# Built-in models: a tiny FLUX.1 stands in for the files of the model of texts ---------------------------------------


@pytest.fixture
def text_model(monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]) -> None:
    monkeypatch.setitem(names.NAMES, "builtin-text", folders("flux"))


@pytest.mark.usefixtures("no_gpu", "text_model")
@pytest.mark.parametrize(
    ("words", "head"),
    [
        (["--prompt", "a red cat"], "builtin-text: 1 image of 16 tokens, guidance 3.5 as an input"),
        (["--model", "builtin-text", "--prompt", "a", "b"], "builtin-text: 2 images of 16 tokens, guidance 3.5"),
        (["--classes", "cat", "rocket"], "builtin: 2 images of "),
        ([], "builtin: 12 images of "),
    ],
    ids=str,
)
def test_a_plan_names_the_model_that_the_flags_mean(capsys: Captured, words: list[str], head: str) -> None:
    """The size of a picture of a text is that of the decoder, 16 pixels, 4 tokens, along a side."""
    command(["plan", "--gpus", "2", *words])
    assert capsys.readouterr().out.startswith(head)


@pytest.mark.usefixtures("no_gpu", "text_model")
def test_a_prompt_alone_is_drawn_by_the_model_of_texts(tmp_path: Path, capsys: Captured) -> None:
    run(Args(prompt=("a red cat",), steps=1, out=tmp_path / "x.png"))
    assert capsys.readouterr().out.count("\nmodel     builtin-text\n") == 1
    assert pixels(tmp_path / "x.png").shape == (16, 16, 3)
    told = parameters(tmp_path / "x.png")
    assert (told["model"], told["chosen"]["size"]) == ("builtin-text", "16x16")
