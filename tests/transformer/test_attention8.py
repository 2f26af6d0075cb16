"""Tests of attention in 8 bits: one rank's bits on all, what keeps its dtype, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor
from torch.utils._pytree import tree_map_only

import seqpar
from seqpar.families import _block
from seqpar.families._block import Attended8, Matrix
from seqpar.families._matrix8 import quantised
from seqpar.graphs.signature import form_of
from seqpar.kernels.prepare8 import restored
from seqpar.kernels.rows8 import Rounding
from seqpar.local import fp8
from seqpar.mesh.mesh import Mesh
from seqpar.transformer import calibration, forward, parallelize
from seqpar.transformer.calibration import Calibration, calibrated
from seqpar.transformer.call import SOON, ShardedCall
from seqpar.transformer.parallelize import call_of
from seqpar.types.protocols import Qkv8
from tests.kernels.test_prepare8 import eight
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.meshes import EXACT, TRANSPORTS, random
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows
from tests.support.sharded import CPU, Outputs, body_of, error, raised

NAMES = ("flux", "flux2", "wan", "sd3_dual", "z_image", "ltx", "ltx2", "cogvideox", "minimax_h3")
UNFUSED = ("flux", "wan", "cogvideox")  # by diffusers' own blocks, too
READ = ("flux", "wan", "sd3_dual", "ltx2", "minimax_h3")  # also with GEMMs in 8 bits, and on several ranks
ROUNDING = 0.1  # of tiny models' outputs, largest error
COMPUTED = (
    *((name, "by functions") for name in NAMES),
    *((name, "with GEMMs in 8 bits") for name in READ),
    *((name, "by modules") for name in UNFUSED),
)


def model(name: str) -> Any:
    return MODELS[name].build().float()


def inputs(name: str) -> dict[str, Any]:
    return tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, MODELS[name].arguments())


def run_of(module: Any, name: str) -> Callable[[], object]:
    return lambda: module(**inputs(name))


def known_of(name: str) -> Calibration:
    module = model(name)
    return calibrated(Mesh.joined(CPU), module, {"": module}, run_of(module, name), attention=True)[""]


@pytest.fixture(scope="module")
def known() -> dict[str, Calibration]:
    return {name: known_of(name) for name in NAMES}


@pytest.fixture(scope="module")
def rounds(known: dict[str, Calibration]) -> dict[str, Mapping[str, Qkv8]]:
    return {name: each.attention for name, each in known.items()}


def computed(body: ShardedCall, name: str) -> Outputs:
    with torch.no_grad():
        return tuple(x.clone() for x in flat(body.compute(form_of(inputs(name)))))


def outputs(
    rank: int,
    world: int,
    device: torch.device,
    every: Sequence[tuple[str, str]],
    known: dict[str, Calibration],
    strategy: str,
    transport: str,
) -> dict[tuple[str, str], Outputs]:
    results = dict[tuple[str, str], Outputs]()
    for name, way in every:
        how: Any = {"fused": way != "by modules", "exact": True, "attention": known[name].attention}
        how["calibration"] = known[name] if way == "with GEMMs in 8 bits" else None
        with by_rows():
            body = body_of(model(name), world, device, strategy, transport, **how)
            results[name, way] = computed(body, name)
        body.release()
    return results


@pytest.fixture(scope="module")
def alone(known: dict[str, Calibration]) -> dict[tuple[str, str], Outputs]:
    return outputs(0, 1, CPU, COMPUTED, known, "ulysses", "collective")


def whole(name: str) -> Outputs:
    return computed(body_of(model(name), fused=True), name)


def test_the_error_is_that_of_rounding(alone: dict[tuple[str, str], Outputs]) -> None:
    for (name, way), got in alone.items():
        assert 1e-5 < error(got, whole(name)) < ROUNDING, (name, way)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_has_one_ranks_bits(
    cpu_ranks: Pool, known: dict[str, Calibration], alone: dict[tuple[str, str], Outputs], world: int
) -> None:
    """Models take turns over the worlds, and ways of a model are on different ones."""
    strategy, transport = EXACT[world % len(EXACT)], TRANSPORTS[world % 2]
    some = [key for key in COMPUTED if key[0] in READ or key[1] == "by modules"]
    every = [key for index, key in enumerate(some) if index % 2 == world - 2]
    assert len({way for _, way in every}) == 3
    for results in cpu_ranks.run(world, outputs, every, known, strategy, transport):
        for key, got in results.items():
            assert all(map(torch.equal, got, alone[key])), key


def test_all_joined_attentions_are_calibrated(rounds: dict[str, Mapping[str, Qkv8]]) -> None:
    for name, known in rounds.items():
        body = body_of(model(name), fused=True, attention=known)
        attentions = body.sharded._attention
        joining = [hook for hook in attentions.values() if not hook.attention.joint.whole_queries]
        assert all(hook.eight is not None for hook in joining), name
        assert f"{len(joining)} of {len(attentions)} attentions in 8 bits" in body.sharded.texts()["computation"]


def test_padding_that_weighs_as_much_as_text_is_in_8_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chroma's pipeline passes a mask whose zeros are the padding at the end of the text."""
    tiny, call = MODELS["chroma"], MODELS["chroma"].arguments()
    text, tokens = call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1]
    mask = torch.ones(tiny.batch, text + tokens, dtype=torch.float64)
    mask[:, text - 3 : text] = 0
    monkeypatch.setitem(MODELS, "chroma", replace(tiny, inputs=lambda batch: {**call, "attention_mask": mask}))
    module, wide = model("chroma"), model("chroma")
    seqpar.parallelize(module, local="fp8", calibrate=run_of(module, "chroma"))
    seqpar.parallelize(wide)
    with torch.no_grad():
        got, want = (flat(each(**inputs("chroma"), return_dict=False)) for each in (module, wide))
    assert 1e-5 < error(got, want) < ROUNDING


@pytest.mark.parametrize("why", ["masks", "keys", "dtype"])
def test_calls_that_do_not_fit_keep_their_dtype(
    why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rounds: dict[str, Mapping[str, Qkv8]]
) -> None:
    name, known = "flux", rounds["flux"]
    if why == "keys":
        monkeypatch.setattr(forward, "MOST_KEYS", 5)
        said = "keys, and 8 bits lose the mean of more than 5"
    elif why == "masks":
        name, said = "qwen_masked", "it has key masks"
        known = known_of(name).attention
    else:
        said = "its dtype or heads are not those of the calibration"
        known = dict.fromkeys(known, next(iter(rounds["wan"].values())))
    got = computed(body_of(model(name), fused=True, attention=known), name)
    assert all(map(torch.equal, got, whole(name)))
    out = capsys.readouterr().out
    assert out.count("seqpar: attention of a call is computed in float32, because") == 1
    assert said in out


def test_negative_control_a_centre_that_is_not_added_back_is_seen(
    monkeypatch: pytest.MonkeyPatch, rounds: dict[str, Mapping[str, Qkv8]]
) -> None:
    right = computed(body_of(model("flux"), fused=True, attention=rounds["flux"]), "flux")

    def uncentred(out: Tensor, eight: Qkv8, dtype: torch.dtype) -> Tensor:
        return restored(out, eight, dtype) - eight.v_centre_GD

    monkeypatch.setattr(_block, "restored", uncentred)
    wrong = computed(body_of(model("flux"), fused=True, attention=rounds["flux"]), "flux")
    assert error(wrong, whole("flux")) > 3 * error(right, whole("flux"))


@pytest.mark.parametrize("name", READ[:4])
def test_gemms_in_8_bits_read_attentions_output_without_another_pass(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Calibration], name: str
) -> None:
    passes = list[int]()
    monkeypatch.setattr(_block, "restored", lambda *given: passes.append(1) or restored(*given))
    for gemms in (known[name], None):
        computed(body_of(model(name), fused=True, calibration=gemms, attention=known[name].attention), name)
        assert bool(passes) is (gemms is None)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_a_gemm_in_8_bits_takes_its_own_centre_out_of_values_that_lack_theirs(
    heads: int, groups: int, centred: bool
) -> None:
    how, out = eight(groups, 16, torch.float64, "cpu"), random((2, 5, heads, 16), 0)
    whole = restored(out, how, torch.float64).flatten(2)
    own = Matrix(random((48, heads * 16), 1), random((48,), 2))
    reader = quantised(own, Rounding(whole.mean((0, 1)).float() + 1 if centred else None), False)
    got, want = reader(Attended8(out, how, torch.float64)), reader(whole)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert error(got, own(whole)) < ROUNDING
    other = replace(how, v_centre_GD=how.v_centre_GD.flip(0))  # another calibration's
    assert error(reader(Attended8(out, other, torch.float64)), want) > 5 * ROUNDING


# The door -------------------------------------------------------------------------------------------------------


def test_it_is_chosen_by_name_with_and_without_gemms(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = whole("flux")
    for precision in (None, "fp8"):
        module = model("flux")
        seqpar.parallelize(module, local="fp8", precision=precision, calibrate=run_of(module, "flux"))
        got = module(**inputs("flux"))[0]
        assert 1e-5 < error(got, wanted[0]) < 2 * ROUNDING
        out = capsys.readouterr().out
        assert "4 of 4 attentions in 8 bits" in out
        assert ("GEMMs in 8 bits" in out) is (precision is not None)
        seqpar.release(module)


def test_what_cannot_be_centred_or_computed_is_refused_before_anything_changes() -> None:
    module = model("flux")
    for work, said in (
        (lambda: seqpar.parallelize(module, local="fp8"), "a transformer alone has no prompts; pass calibrate="),
        (lambda: seqpar.parallelize(module, local="fp8", calibrate=lambda: None), "a run reached no self-attention"),
        (lambda: seqpar.parallelize(module, calibrate=lambda: None), 'precision="fp8" or local="fp8"'),
        (lambda: seqpar.parallelize(model("wan"), local="fp8", calibrate=print), "head dims that 16 divides, not 12"),
    ):
        assert said in raised(work)
    assert "forward" not in vars(module)


class Again:
    """A call that is captured, without a GPU."""

    def __init__(self, work: Callable[[], Any], warm_up: int) -> None:
        self._work, self.results = work, work()

    def replay(self) -> None:
        self.results = self._work()

    def release(self) -> None:
        pass


def test_first_and_last_steps_keep_the_dtype_beside_graphs_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.transformer.test_pipelines import CASES

    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32})
    monkeypatch.setattr(fp8, "why_not", lambda *_: None)  # of heads of 8
    monkeypatch.setattr(parallelize, "_capture", lambda sharded: Again)
    lossy: Any = {"local": "fp8", "attention_steps": "1:-1"}
    made = list[tuple[list[Tensor], list[bool], int]]()
    for options in ({}, lossy):
        pipe, latents, eight = CASES["flux"].pipe(), list[Tensor](), list[bool]()
        pipe.set_progress_bar_config(disable=True)
        seqpar.parallelize(pipe, Mesh.single(), **options)
        call = call_of(pipe.transformer)
        assert call is not None

        def end(*args: Any, state: Any = call.state, latents: Any = latents, eight: Any = eight) -> dict[str, Any]:
            latents.append(args[-1]["latents"].clone())
            eight.append(state.eight and not state.keeps_attention)
            return {}

        call._changes.extend([-SOON, -SOON])  # nothing has changed for long
        asked: Any = {"height": 32, "width": 32, "generator": torch.Generator().manual_seed(0)}
        pipe("a fox", num_inference_steps=4, callback_on_step_end=end, output_type="latent", **asked)
        made.append((latents, eight, len(call.graphs)))
        if options:
            assert "one attention in all steps" in raised(lambda pipe=pipe: seqpar.keep_budget(pipe, 20))
        seqpar.release(pipe)
    (plain, *_, graphs), (some, eight, with_eight) = made
    assert (graphs, with_eight, eight) == (1, 2, [False, True, True, False])
    assert torch.equal(some[0], plain[0])
    assert not any(map(torch.equal, some[1:], plain[1:]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_steps": "2"}, "expected START:STOP, such as 2:-2"),
        ({"local": "auto"}, "attention steps 2:-2 need the local attention fp8"),
        ({"precision": "fp8", "min_psnr": 20}, "attention steps 2:-2 with a least PSNR"),
        ({"scheduler": DDIMScheduler()}, "a pipeline whose scheduler counts its steps (step_index), not DDIMScheduler"),
        ({"alone": True, "calibrate": lambda: None}, "(step_index), not FluxTransformer2DModel"),
    ],
    ids=["no range", "another attention", "a budget", "DDIM", "no pipeline"],
)
def test_steps_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str) -> None:
    from tests.transformer.test_pipelines import CASES

    pipe = CASES["flux"].pipe()
    pipe.scheduler = options.pop("scheduler", pipe.scheduler)
    what: Any = pipe.transformer if options.pop("alone", False) else pipe
    options = {"local": "fp8", "attention_steps": "2:-2", **options}
    assert said in raised(lambda: seqpar.parallelize(what, **options))


def test_fixed_prompts_centre_once_for_the_same_weights_and_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.transformer.test_pipelines import CASES

    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32})
    monkeypatch.setattr(fp8, "why_not", lambda *_: None)  # of heads of 8
    runs, measured = [], calibration._measured
    monkeypatch.setattr(calibration, "_measured", lambda *args: runs.append(1) or measured(*args))
    for _ in range(2):
        pipe = CASES["flux"].pipe()
        pipe.set_progress_bar_config(disable=True)
        seqpar.parallelize(pipe, local="fp8")
        result = seqpar.measure_precision(pipe, ["a fox"], num_inference_steps=2, height=32, width=32)
        assert 10 < result.worst_psnr < 100
        assert result.floor[0].psnr > result.errors[0].psnr
        seqpar.release(pipe)
    assert (len(runs), len(list(tmp_path.iterdir()))) == (1, 1)
