"""Tests of GEMMs in 8 bits: one rank's bits on all, centres that cost nothing, and what must be refused or noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import seqpar
from seqpar.families import _matrix8
from seqpar.families._block import Matrix
from seqpar.families._find import BLOCKS, stored_in_8_bits
from seqpar.families._matrix8 import Matrix8, quantised
from seqpar.kernels.rows8 import Activation, Rounding, Rows8, product8, reference, rounded
from seqpar.kernels.weight8 import Weight8
from seqpar.loading.parts import transformers_of
from seqpar.loading.placing import put
from seqpar.mesh.mesh import Mesh
from seqpar.transformer import calibration
from seqpar.transformer.calibration import Calibration, FixedRun, calibrated, fixed_run, matrices_of, why_not_here
from tests.support import pipelines
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import EXACT, TRANSPORTS
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows
from tests.support.sharded import CPU, Outputs, body_of, called, error, raised

pytestmark = pytest.mark.slow

EIGHT = (
    *("flux", "flux2", "qwen_masked", "wan", "wan_vace", "chroma", "sd3_dual", "hunyuan", "hunyuan15", "krea2"),
    *("z_image", "ltx", "ltx2", "ltx2_3", "cogvideox", "flux3_reference", "minimax_h3"),
)
STORED = ("flux", "wan", "qwen_masked", "ltx2", "minimax_h3")  # whose weights are in memory in 8 bits alone
ROUNDING = 0.1  # of tiny models' outputs, largest error; rounding to 3 bits costs a few percent in each GEMM


def model(name: str) -> Any:
    return MODELS[name].build().double()


def with_weights_in_8_bits(name: str) -> Any:
    """Return a model of which ranks compute with copies in 8 bits, or, of `STORED`, with nothing else."""
    module = model(name)
    for key in stored_in_8_bits(module) if name in STORED else ():
        weight = module.get_parameter(key).detach()
        put(module, key, Weight8.of(weight, partial(torch.clone, weight)))
    return module


def run_of(module: Any, name: str) -> Callable[[], object]:
    return lambda: MODELS[name].whole(module)


@pytest.fixture(scope="module")
def calibrations() -> dict[str, Calibration]:
    made = dict[str, Calibration]()
    for name in EIGHT:
        module = with_weights_in_8_bits(name)
        (made[name],) = calibrated(Mesh.joined(CPU), module, {"": module}, run_of(module, name)).values()
        assert name not in STORED or made[name].products.keys() == made[name].means.keys()
    return made


def eight(
    rank: int, world: int, device: torch.device, made: dict[str, Calibration], strategy: str, transport: str
) -> dict[str, Outputs]:
    results = dict[str, Outputs]()
    for name, known in made.items():
        with by_rows():
            module = with_weights_in_8_bits(name)
            body = body_of(module, world, device, strategy, transport, fused=True, exact=True, calibration=known)
            results[name] = called(body, MODELS[name].arguments())
        body.release()
    return results


@pytest.fixture(scope="module")
def alone(calibrations: dict[str, Calibration]) -> dict[str, Outputs]:
    return eight(0, 1, CPU, calibrations, "ulysses", "collective")


def whole(name: str) -> Outputs:
    return called(body_of(model(name), fused=True), MODELS[name].arguments())


@pytest.mark.parametrize("name", EIGHT)
def test_the_error_is_that_of_rounding(alone: dict[str, Outputs], name: str) -> None:
    assert 1e-4 < error(alone[name], whole(name)) < ROUNDING


@pytest.mark.parametrize("turn", range(len(EXACT)))
def test_any_number_of_ranks_has_one_ranks_bits(
    cpu_ranks: Pool, calibrations: dict[str, Calibration], alone: dict[str, Outputs], turn: int
) -> None:
    """Models take turns over strategies; a third of them is on three ranks."""
    world, names = 2 + turn % 2, EIGHT[turn :: len(EXACT)]
    known = {name: calibrations[name] for name in names}
    for results in cpu_ranks.run(world, eight, known, EXACT[turn], TRANSPORTS[turn % 2]):
        for name in names:
            assert all(map(torch.equal, results[name], alone[name])), name


@pytest.mark.parametrize("name", ["flux", "chroma", "hunyuan", "krea2", "ltx2_3", "flux3_reference"])
def test_matrices_that_stay_get_inputs_that_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, calibrations: dict[str, Calibration], alone: dict[str, Outputs], name: str
) -> None:
    for kind, block in BLOCKS.items():
        monkeypatch.setitem(BLOCKS, kind, replace(block, eight=[part for part in block.eight if "qkv" in part]))
    body = body_of(model(name), fused=True, calibration=calibrations[name])
    right = whole(name)
    assert 1e-4 < error(called(body, MODELS[name].arguments()), right) < error(alone[name], right)


@pytest.mark.parametrize("name", EIGHT)
def test_only_attentions_output_takes_a_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch, calibrations: dict[str, Calibration], name: str
) -> None:
    body, passes = body_of(model(name), fused=True, calibration=calibrations[name]), list[Rounding]()

    def counting(x: Tensor, rounding: Rounding, activation: Activation | None = None) -> Rows8:
        passes.extend([rounding] if activation is None else [])
        return reference(x, rounding, activation)

    monkeypatch.setattr(_matrix8, "round_rows", counting)
    called(body, MODELS[name].arguments())
    computed = [hook.matrices for hook in body.sharded.fused.hooks.values() if hook.all_matrices]
    eight = [part for of in computed for part, matrix in of.items() if isinstance(matrix, Matrix8)]
    outputs = [part for part in eight if part == "out" or part.endswith(" out")]
    # gates are computed in 16 bits, of the same input; LTX asks the text with a stream that no kernel makes
    gated = [part for of in computed for part in of if part in ("video gates", "video text gates")]
    streams = ["text q" for _ in computed if name == "ltx"]
    assert len(passes) == len(outputs + gated + streams)


# One GEMM -------------------------------------------------------------------------------------------------------


def gemm(width: int = 48, inner: int = 160) -> tuple[Matrix, Tensor, Tensor]:
    """Return a matrix, its inputs, which have a mean and an outlier channel, and their truth in fp64."""
    random = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=random) for shape in ((width, inner), (width,)))
    x = torch.randn(2, 37, inner, dtype=torch.float64, generator=random) + 3
    x[..., 5] *= 6.6e4
    return Matrix(weight, bias), x, x @ weight.t() + bias


def bias_of(got: Tensor, truth: Tensor) -> float:
    return float((got - truth).mean((0, 1)).norm() / truth.mean((0, 1)).norm())


def test_a_centre_is_put_back_exactly_and_takes_the_error_of_the_mean_away() -> None:
    matrix, x, truth = gemm()
    x[..., 5] /= 6.6e4
    truth = matrix(x)
    centred = quantised(matrix, Rounding(x.mean((0, 1)).float()), False)
    plain = quantised(matrix, Rounding(None), False)
    assert bias_of(centred(x), truth) < 3e-3 < bias_of(plain(x), truth)
    other = quantised(matrix, Rounding(torch.full((160,), 2.0)), False)  # any fixed vector is exact
    assert bias_of(other(x), truth) < 2e-2


def test_outliers_of_one_token_do_not_change_another() -> None:
    matrix, x, _ = gemm()
    eight = quantised(matrix, Rounding(None), False)
    alone = eight(x[:, 3:4])
    assert torch.equal(eight(x)[:, 3:4], alone)
    x[:, 4:] *= 1e5
    assert torch.equal(eight(x)[:, 3:4], alone)


def test_parts_of_a_matrix_add_up() -> None:
    matrix, x, _ = gemm()
    eight = quantised(matrix, Rounding(x.mean((0, 1)).float()), False)
    q, k = eight.split_outputs(16, 32)
    assert torch.equal(torch.cat([q(x), k(x)], dim=-1), eight(x))
    first, second = eight.split_inputs(64)
    y = first.added_to(second(x[..., 64:]), x[..., :64])
    assert isinstance(y, tuple)  # the gate's kernel adds them
    assert error(y[0] + y[1], matrix(x)) < 0.05


def test_the_sum_is_exact_and_saturates_nowhere() -> None:
    random = torch.Generator().manual_seed(1)
    x = 1e30 * torch.randn(1, 3, 512, dtype=torch.float64, generator=random)
    rows, (weight, scales) = reference(x, Rounding(None)), rounded(torch.randn(8, 512, generator=random))
    assert rows.values.float().abs().max() == 448
    assert error(rows.wide(), x) < 1 / 16
    order = torch.randperm(512, generator=random)
    turned = rows._replace(values=rows.values[..., order])
    assert torch.equal(product8(rows, weight, scales.flatten()), product8(turned, weight[:, order], scales.flatten()))


@pytest.mark.parametrize("fault", ["another row's scale", "a stale centre", "no centre in the bias", "half a scale"])
def test_negative_control_faults_of_a_gemm_are_seen(fault: str) -> None:
    matrix, x, _ = gemm()
    x[..., 5] /= 6.6e4
    x = x * torch.linspace(0.1, 10, x.shape[1], dtype=torch.float64)[:, None]
    truth, right = matrix(x), quantised(matrix, Rounding(x.mean((0, 1)).float()), False)
    rows = reference(x, right.reads)
    stale = Rounding(x.mean((0, 1)).float() + 5)
    wrong = {
        "another row's scale": (right, rows._replace(scales=rows.scales.roll(1, 1))),
        "a stale centre": (replace(right, folded=quantised(matrix, stale, False).folded), rows),
        "no centre in the bias": (replace(right, folded=matrix.bias), rows),
        "half a scale": (replace(right, scales=right.scales / 2), rows),
    }
    assert error(right(rows), truth) < 0.05
    made, given = wrong[fault]
    assert error(made(given), truth) > 0.05
    if fault == "a stale centre":
        with pytest.raises(ValueError, match="rounded for another matrix"):
            right(reference(x, stale))


# Calibration ----------------------------------------------------------------------------------------------------


def means_of(module: Any, mesh: Mesh | None = None) -> dict[str, Tensor]:
    return dict(calibrated(mesh or Mesh.single(), module, {"": module}, run_of(module, "flux"))[""].means)


def means(rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    return means_of(model("flux"), Mesh.joined(device))


def test_calibrations_are_equal_on_any_number_of_ranks_and_are_the_means(cpu_ranks: Pool) -> None:
    module, seen = model("flux"), list[Tensor]()
    wanted = means(0, 1, CPU)
    module.transformer_blocks[0].ff.net[2].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run_of(module, "flux")()
    mean = seen[0].flatten(0, -2).mean(0).float()
    torch.testing.assert_close(wanted["transformer_blocks.0, image down"], mean)
    assert wanted.keys() == matrices_of(module).keys()
    for world in (2, 3, 4):
        for got in cpu_ranks.run(world, means):
            assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("outlier", [1e3, 6.6e4, 1e6])
def test_gemms_that_rounding_would_ruin_keep_their_dtype(outlier: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A channel of 1e6, which the weights of q, k and v do not read, leaves few steps for the others.

    With less the input has the same crest factor, the square root of its channels, but e4m3's exponents hold it.
    """
    module = model("flux")
    block = module.single_transformer_blocks[0]
    with torch.no_grad():
        block.norm.linear.bias[2 * block.norm.linear.in_features - 1] = outlier  # scale of the norm's last channel
        for layer in (block.attn.to_q, block.attn.to_k, block.attn.to_v):
            layer.weight[:, -1] = 0
    (made,) = calibrated(Mesh.single(), module, {"": module}, run_of(module, "flux")).values()
    if outlier < 1e6:
        assert not made.rough
        assert 0.02 < made.errors["single_transformer_blocks.0, qkv"] < 0.05
        return
    assert made.rough == {"single_transformer_blocks.0, qkv"}
    assert (
        "1 GEMMs keep the dtype of the weights, because rounding changes them by more than 10%"
        in capsys.readouterr().out
    )
    body = body_of(module, fused=True, calibration=made)
    assert "21 of 28 GEMMs in 8 bits" in body.sharded.texts()["computation"]
    called(body, MODELS["flux"].arguments())


def test_fixed_prompts_calibrate_once_for_the_same_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from tests.transformer.test_pipelines import CASES

    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32})
    runs, measured = [], calibration._measured
    monkeypatch.setattr(calibration, "_measured", lambda *args: runs.append(1) or measured(*args))
    for change in (0.0, 0.0, 1.0):
        pipe = CASES["flux"].pipe()
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            pipe.transformer.proj_out.weight += change
        seqpar.parallelize(pipe, precision="fp8")
        CASES["flux"].pictures(pipe, 0, steps=2)
        seqpar.release(pipe)
    assert (len(runs), len(list(tmp_path.iterdir()))) == (2, 2)


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "wan", "wan_i2v"])
def test_fixed_inputs_reach_all_gemms_and_show_no_bar(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32, "num_frames": 5})
    pipe = getattr(pipelines, name)().to(torch.float32)
    pipe.set_progress_bar_config(desc="mine")
    (made,) = calibrated(Mesh.single(), pipe, transformers_of(pipe), None).values()
    assert made.means.keys() == matrices_of(pipe.transformer).keys()
    out, errors = capsys.readouterr()
    count = len(made.means)
    said = f"seqpar: {count} of {count} GEMMs in 8 bits are centred by fixed prompts\n"
    assert (out, "it/s" in errors) == (said, False)
    with pipe.progress_bar([]) as bar:
        assert bar.desc == "mine"


def test_adapters_take_no_part() -> None:
    """Neither in the numbers nor in the name of the file, and they are active as before."""
    module = model("flux")
    run = FixedRun(module, {})
    plain, path = means_of(module), calibration._path(run, {"": module})
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], init_lora_weights=False))
    adapted = module(**MODELS["flux"].arguments())[0]
    assert error(adapted, whole("flux")[0]) > 1e-3
    again = means_of(module)
    assert again.keys() == plain.keys()
    assert all(map(torch.equal, again.values(), plain.values()))
    assert calibration._path(run, {"": module}) == path
    assert torch.equal(module(**MODELS["flux"].arguments())[0], adapted)


def test_encoded_texts_stand_in_for_encoders_and_a_run_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "file" / "none"))
    (tmp_path / "file").touch()  # a cache that cannot be written
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32})
    pipe, random = pipelines.flux().to(torch.float32), torch.Generator().manual_seed(0)
    width, pooled = pipe.transformer.config.joint_attention_dim, pipe.transformer.config.pooled_projection_dim
    pipe.tokenizer = pipe.tokenizer_2 = pipe.text_encoder = pipe.text_encoder_2 = None
    assert "has no text encoders; pass calibrate=" in str(fixed_run(pipe)[1])
    texts = {"prompt_embeds": (2, 16, width), "pooled_prompt_embeds": (2, pooled)}
    run, _ = fixed_run(pipe, {name: torch.randn(*shape, generator=random) for name, shape in texts.items()})
    (made,) = calibrated(Mesh.single(), pipe, transformers_of(pipe), run).values()
    assert made.means.keys() == matrices_of(pipe.transformer).keys()
    pipe.transformer.norm_out = None
    capsys.readouterr()
    (made,) = calibrated(Mesh.single(), pipe, transformers_of(pipe), run).values()
    assert not made.means
    assert "all sums are exact, because FluxPipeline failed with fixed prompts" in capsys.readouterr().out


# The door -------------------------------------------------------------------------------------------------------


def test_a_run_that_reaches_nothing_and_one_that_fails_are_refused() -> None:
    module = model("flux")
    assert "reached no GEMM" in raised(lambda: seqpar.parallelize(module, precision="fp8", calibrate=lambda: None))
    assert "calibrate= failed: 'x'" in raised(
        lambda: seqpar.parallelize(module, precision="fp8", calibrate=lambda: {}["x"])
    )
    assert "forward" not in vars(module)


def test_weights_written_in_place_are_followed() -> None:
    module = model("flux")
    seqpar.parallelize(module, precision="fp8", calibrate=run_of(module, "flux"))
    arguments = MODELS["flux"].arguments()
    before = module(**arguments)[0].clone()
    with torch.no_grad():
        module.transformer_blocks[0].attn.to_q.weight.mul_(-3)
    followed = module(**arguments)[0].clone()
    assert error(followed, before) > 1e-3
    for mode in (True, False):
        seqpar.refresh(module)
        with torch.inference_mode(mode):
            assert torch.equal(module(**arguments)[0], followed)  # all of it is new

    # what is written through `.data` has no version: `refresh` is for it
    module.transformer_blocks[0].attn.to_k.weight.data.mul_(-3)
    seqpar.refresh(module)
    assert error(module(**arguments)[0], followed) > 1e-3
    seqpar.release(module)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("flux", {"precision": "int8"}, "precision='int8', expected one of fp8"),
        ("flux", {"precision": "fp8", "native": False}, "native=False turns off"),
        ("flux", {"calibrate": print}, 'calibrate= without precision="fp8"'),
        ("flux", {"precision": "fp8", "calibrate": "x"}, "calibrate='x', expected a function"),
        ("flux", {"precision": "fp8", "calibrate": {}}, "got calibrate= for , expected one for "),
        ("pixart", {"precision": "fp8"}, "no blocks that compute in 8 bits; known ones: ChromaSingleTransformerBlock"),
    ],
)
def test_what_has_no_8_bits_is_refused_before_anything_changes(name: str, options: Any, says: str) -> None:
    module = MODELS[name].build()
    assert says in raised(lambda: seqpar.parallelize(module, **options))
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((8, 0), torch.bfloat16, "Old GPU has no products of e4m3; these need compute capability 8.9 or newer"),
        ((9, 0), torch.float16, "weights are float16, expected bfloat16"),
        ((8, 9), torch.bfloat16, None),
    ],
)
def test_a_gpu_needs_e4m3_and_bf16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, says: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    assert why_not_here(torch.device("cuda"), dtype) == says
    assert why_not_here(CPU, torch.float64) is None


def test_every_matrix_in_8_bits_exists() -> None:
    for block in BLOCKS.values():
        assert {*block.eight} <= block.layers.keys()
