"""Tests that every family computes on 1 to 6 ranks what diffusers computes in one process, in fp64.

One table: each model of `tests/support/diffusers_tiny.py`, with odd numbers of tokens and of heads, by the family's
blocks if it has some; each class with such blocks by each strategy. Ranks, transports, exact mode, diffusers' own
blocks beside them, and the strategies of other models take turns. Select by `pytest -k chroma`.
The truth is the unchanged module, without its roundings to fp32 (`StayDouble`); what remains is the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor

import seqpar
from seqpar.families import __main__, _prove
from seqpar.families._cuts import CutTokens
from seqpar.families._find import CUTS, FILES
from seqpar.families._tiny import HEADS as NUMBER
from seqpar.families._tiny import Tiny
from seqpar.transformer.forward import CallState
from tests.families.test_blocks import ALIKE, FUSED, blocks_named, counted
from tests.support.diffusers_tiny import MODELS, OTHERS, SPLIT, Inputs, flat, kept, truth
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, mesh, refused
from tests.support.pool import Pool, server
from tests.support.sharded import TOLERANCE, VISIBLE, Outputs, body_of, called, error

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi asks for fp32

# as many tokens of the text as a rank has of the video; more ranks than half the heads
WORLDS = {"wan_like_lengths": (3, 3, 3, 3), "minimax_h3": (2, 3, 5, 6, 4, 1)}


Way = tuple[str, str, bool, tuple[bool, ...]]
"""A strategy, a transport, whether it is exact mode, and whether blocks are the family's, diffusers' own, or both."""
HEADS = ("num_attention_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _cases() -> list[Any]:
    """Return (model, ranks, ways), in one job for each number of ranks.

    Blocks of a family give their streams to strategies in a way of their own, so that each meets each strategy. Others,
    and further models of a class, meet two of five; one where they compute as another model of their class does.
    """
    cases: dict[tuple[str, int], list[Way]] = {}
    first = {MODELS[name].kind: name for name in reversed(SPLIT)}
    for (turn, name), (index, strategy) in product(enumerate(SPLIT), enumerate(LAYOUTS)):
        is_first = name == first[MODELS[name].kind]
        met = 1 if name in ALIKE and not is_first else 5 if name in FUSED and is_first else 2
        if (turn + 2 * index) % 5 >= met:
            continue
        config = MODELS[name].config
        heads = next((config[key] for key in HEADS if key in config), NUMBER)
        kv_heads = next((config[key] for key in KV_HEADS if key in config), heads)
        worlds = WORLDS.get(name, (2, 3, 4, 2, 3, 1))
        world = worlds[(turn + index) % len(worlds)]
        if refused(strategy, world, heads, kv_heads) is None:
            exact = strategy in EXACT and turn // 2 % 2 == 1
            transport = TRANSPORTS[(turn + index // 2) % len(TRANSPORTS)]
            blocks = (True, False)[: 1 + ((turn + 2 * index) % 5 == 0)] if name in FUSED else (False,)
            cases.setdefault((name, world), []).append((strategy, transport, exact, blocks))
    return [pytest.param(*case, tuple(ways), id=f"{case[0]}-{case[1]}") for case, ways in cases.items()]


CASES = _cases()


def computed(
    rank: int, world: int, device: torch.device, name: str, ways: tuple[Way, ...]
) -> dict[tuple[Way, bool], tuple[Outputs, list[str]]]:
    """Return outputs and called functions of the second of two calls, which uses the same buffers."""
    results, module = {}, kept(name, str(device))
    for way, fused in ((each, fused) for each in ways for fused in each[3]):
        strategy, transport, exact, _ = way
        with counted() as calls:
            body = body_of(module, world, device, strategy, transport, fused=fused, exact=exact)
            called(body, MODELS[name].arguments(device))
            calls.clear()
            results[way, fused] = called(body, MODELS[name].arguments(device)), list(calls)
            body.release()
    return results


@pytest.mark.parametrize(("name", "world", "ways"), CASES)
def test_a_family_computes_what_diffusers_does(ranks: Pool, name: str, world: int, ways: tuple[Way, ...]) -> None:
    for results in ranks.run(world, computed, name, ways):
        for (way, fused), (outputs, calls) in results.items():
            assert error(outputs, truth(name, ranks.device)) < TOLERANCE, (way, fused)
            assert sorted(calls) == sorted(blocks_named(name) * fused), (way, fused)


def test_the_table_has_every_family_by_every_strategy_and_number_of_ranks() -> None:
    cases = [(name, world, *way) for name, world, ways in (case.values for case in CASES) for way in ways]  # pyright: ignore
    assert set(CUTS) == {MODELS[str(name)].kind for name, *_ in cases}
    assert {world for _, world, *_ in cases} == {1, 2, 3, 4, 5, 6}
    assert {name for name, *_ in cases} == {case[0] for case in cases if False in case[-1]}
    for strategy in LAYOUTS:
        of_strategy = [case for case in cases if case[2] == strategy]
        assert {2, 3, 4} <= {case[1] for case in of_strategy}
        assert {case[3] for case in of_strategy} == set(TRANSPORTS)
        assert {bool(case[4]) for case in of_strategy} == ({False, True} if strategy in EXACT else {False})
        assert {fused for case in of_strategy for fused in case[5]} == {False, True}


@pytest.mark.parametrize("name", ["flux", "wan", "lumina2"])
def test_the_truth_leaves_out_roundings_to_fp32_and_nothing_else(name: str) -> None:
    """There must be some, or `StayDouble` is not needed."""
    with torch.no_grad():
        rounded = flat(MODELS[name].build()(**MODELS[name].arguments(), return_dict=False))
    assert TOLERANCE < error(rounded, truth(name, "cpu")) < 1e-4


# Calls that keep keys and values for later ones ----------------------------------------------------------------


def qwen_image21(given: Inputs) -> Iterator[Inputs]:
    """Yield a first step, which keeps the tokens before the new picture, and a second one, which reads them."""
    first = {**given, "kv_cache": QwenImage21KVCache(2), "kv_cache_mode": "extract"}
    yield first
    yield {**first, "kv_cache_mode": "cached", "hidden_states": given["hidden_states"] * 2}


def glm_image(given: Inputs) -> Iterator[Inputs]:
    """Yield a call for the reference picture of each row, then one that reads them, and one that does not."""
    caches = GlmImageKVCache(2)
    caches.set_mode("write")
    for row in range(2):
        one: Inputs = {name: x if x is None else x[row : row + 1] for name, x in given.items()}
        no_text = one["encoder_hidden_states"][:, :0]
        yield {**one, "encoder_hidden_states": no_text, "prior_token_drop": one["prior_token_drop"] & False} | {
            "hidden_states": one["hidden_states"] / 2,
            "kv_caches": caches,
        }
        caches.next_sample()
    for mode in ("read", "skip"):
        caches.set_mode(mode)
        yield {**given, "kv_caches": caches}


WAYS = ((1, "ulysses"), (2, "kv_gather"), (3, "ring"), (3, "ulysses"))
STEPS = {"qwenimage21": qwen_image21, "glmimage": glm_image}


def stepped(rank: int, world: int, device: torch.device, name: str, strategy: str) -> list[Outputs]:
    body, given = body_of(MODELS[name].build().to(device), world, device, strategy), MODELS[name].arguments(device)
    with StayDouble():
        results = [(body(**each, return_dict=False)[0].clone(),) for each in STEPS[name](given)]
    body.release()
    return results


@pytest.mark.parametrize(("name", "world", "strategy"), [(name, n, s) for name in STEPS for n, s in WAYS])
def test_keys_that_are_kept_are_read_on_all_ranks(ranks: Pool, name: str, world: int, strategy: str) -> None:
    module, given = MODELS[name].build().to(ranks.device), MODELS[name].arguments(ranks.device)
    wanted = [MODELS[name].whole(module, each) for each in STEPS[name](given)]
    for results in ranks.run(world, stepped, name, strategy):
        for got, whole in zip(results, wanted, strict=True):
            assert error(got, tuple(x.to(got[0].device) for x in whole)) < TOLERANCE


def by_branches(rank: int, world: int, device: torch.device) -> list[Outputs]:
    """Return the outputs of calls of which some keep or read keys of all rows, with an axis that would split rows."""
    module, given = MODELS["glmimage"].build().to(device), MODELS["glmimage"].arguments(device)
    seqpar.parallelize(module, mesh(device, cfg=2))
    in_double(module)
    results = [(module(**each, return_dict=False)[0].clone(),) for each in glm_image(given)]
    seqpar.release(module)
    return results


def test_keys_of_all_rows_are_kept_on_each_rank(ranks: Pool) -> None:
    module, given = MODELS["glmimage"].build().to(ranks.device), MODELS["glmimage"].arguments(ranks.device)
    wanted = [MODELS["glmimage"].whole(module, each) for each in glm_image(given)]
    for results in ranks.run(2, by_branches):
        assert max(map(error, results, wanted)) < TOLERANCE


# Arguments that a class of diffusers takes, too ------------------------------------------------------------------


def rare(name: str, device: str | torch.device) -> tuple[Any, Inputs]:
    """Return a transformer and arguments: whole rows that are dropped, and a text that no layer reads."""
    tiny, given = MODELS[name], MODELS[name].arguments(device)
    if name == "glmimage":
        given["prior_token_drop"] = torch.tensor([True, False], device=device)
    return (tiny.having(text_embed_2_dim=None) if name == "hunyuanimage" else tiny).build().to(device), given


def of_rare(rank: int, world: int, device: torch.device, name: str) -> Outputs:
    module, given = rare(name, device)
    seqpar.parallelize(module, mesh(device, ulysses=world))
    in_double(module)
    results = (module(**given, return_dict=False)[0].clone(),)
    seqpar.release(module)
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["glmimage", "hunyuanimage"])
def test_arguments_of_rare_shapes_mean_what_they_do_in_diffusers(ranks: Pool, name: str, world: int) -> None:
    wanted = MODELS[name].whole(*rare(name, ranks.device))
    for got in ranks.run(world, of_rare, name):
        assert error(got, tuple(x.to(got[0].device) for x in wanted)) < TOLERANCE


# Negative controls ---------------------------------------------------------------------------------------------


def mistaken(rank: int, world: int, device: torch.device, name: str, mistake: str) -> Outputs:
    tiny = MODELS[name]
    body, right = body_of(tiny.build().to(device), world, device, "ulysses"), CallState.cut
    arguments = tiny.arguments(device)

    def wrong(self: CallState, x: Tensor, cut: CutTokens) -> Tensor:
        local = right(self, x, cut)
        rotary = (cut.stream == "image" and not x.is_floating_point()) or x.dim() == 2
        if (mistake, cut.stream, rotary) in (("text", "text", False), ("rotary", "image", True)):
            return x.narrow(cut.dim, 0, local.shape[cut.dim])  # the tokens of rank 0
        return local

    if mistake == "mask":
        mask = next(key for key in arguments if key.endswith("mask"))
        arguments[mask] = arguments[mask].roll(1, dims=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallState, "cut", wrong)
        return called(body, arguments)


MISTAKES = (
    *(("text", name) for name in ("flux", "sd3")),
    *(("rotary", name) for name in ("flux", "hunyuan", "cogvideox")),
    *(("mask", name) for name in ("qwen_masked", "hunyuan", "mochi", "lumina2")),
)


@pytest.mark.parametrize(("mistake", "name"), MISTAKES)
def test_negative_control_wrong_cuts_and_masks_are_noticed(ranks: Pool, name: str, mistake: str) -> None:
    for got in ranks.run(2, mistaken, name, mistake):
        assert error(got, truth(name, ranks.device)) > VISIBLE


# python -m seqpar.families -------------------------------------------------------------------------------------


def proven(rank: int, world: int, device: torch.device, kind: str, wrong: bool) -> _prove.Proof:
    cuts = CUTS[kind]
    cuts = replace(cuts, attention={}, local=(*cuts.attention, *cuts.local)) if wrong else None
    return _prove.compare(kind, not wrong and _prove.ways(kind)[-1], cuts)  # the table has diffusers' own blocks, too


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Kandinsky rounds to fp32
@pytest.mark.parametrize("kind", [kind for kind in CUTS if kind not in OTHERS])
def test_every_family_is_proven(cpu_ranks: Pool, kind: str) -> None:
    """The models of `OTHERS` are those of the table."""
    assert _prove.verdict(cpu_ranks.run(3, proven, kind, False)) is None


def test_a_wrong_family_is_caught_at_its_first_wrong_module(cpu_ranks: Pool) -> None:
    verdict = _prove.verdict(cpu_ranks.run(3, proven, "WanTransformer3DModel", True))  # whose attention is local
    assert "the first module that differs: blocks.0.attn1" in (verdict or "")


def refused_output(rank: int, world: int, device: torch.device, kind: str) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        _prove.compare(kind, False, replace(CUTS[kind], output=Transformer2DModelOutput))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Flux2Transformer2DModel", "got results in Transformer2DModelOutput, expected Flux2Transformer2DModelOutput"),
        ("MiniMaxH3Transformer3DModel", "takes 2 positional arguments but 3 were given"),
    ],
)
def test_a_wrong_class_of_results_is_caught(cpu_ranks: Pool, kind: str, expected: str) -> None:
    assert all(expected in error for error in cpu_ranks.run(3, refused_output, kind))


def test_the_command_prints_a_line_per_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "proofs", lambda kinds: zip(kinds, (None, "differs by 1"), strict=True))
    assert __main__.main(["pixart"]) == 1
    lines = "PixArtTransformer2DModel: 3 ranks agree with one process\nDiTTransformer2DModel: differs by 1\n"
    assert capsys.readouterr().out == lines
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["unknown"])


def test_the_command_lists_all_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    lines = {name: text for name, _, text in (x.partition(": ") for x in capsys.readouterr().out.splitlines())}
    assert lines["AuraFlowTransformer2DModel"] == "runs"
    assert lines["HeliosTransformer3DModel"] == "runs by its own plan"
    assert lines["SanaTransformer2DModel"].startswith("not split: it mixes tokens by linear attention")
    assert lines["HunyuanDiT2DModel"] == "no cuts are known; pass them as cuts="
    assert lines.keys() - {f"{len(CUTS) + 1} of {len(lines) - 1} run"} == set(_prove.transformers())


def test_the_command_starts_ranks_that_prove_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked, not spawned, which gives them the same and imports nothing."""
    forking = server()
    monkeypatch.setattr(_prove.multiprocessing, "get_context", lambda method: forking)
    assert dict(_prove.proofs(["DiTTransformer2DModel"])) == {"DiTTransformer2DModel": None}


def test_a_class_without_a_file_of_its_own_and_an_unknown_name() -> None:
    assert _prove.kinds_of("pixart") == ["PixArtTransformer2DModel", "DiTTransformer2DModel"]
    assert _prove.kinds_of("HeliosTransformer3DModel") == ["HeliosTransformer3DModel"]
    with pytest.raises(ValueError, match=r"unknown is no family and no transformer with cuts; families: .*wan"):
        _prove.kinds_of("unknown")


def test_tiny_models_are_of_classes_with_cuts() -> None:
    for file in FILES.values():
        tiny: dict[str, Tiny] = getattr(file, "TINY", {})
        assert tiny.keys() <= getattr(file, "CUTS", {}).keys()
