"""Tests masks that a pipeline passes to attention: by keys they are split, others are right on one rank and refused."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.attention._key_order import ByPadding
from seqpar.families import krea2
from seqpar.families._find import CUTS
from seqpar.graphs.deferred import DeferredResult
from seqpar.graphs.graphs import Graphs
from seqpar.graphs.signature import form_of
from seqpar.local import reference, sdpa
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.attention import UNLIKE
from seqpar.transformer.masks import Preparation
from seqpar.types.masks import key_bias
from seqpar.verifying.verify import VerificationError
from tests.families.test_blocks import cast
from tests.support.calls import Captures
from tests.support.diffusers_tiny import MODELS, flat, padded
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import EXACT, LAYOUTS, mesh_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, Outputs, body_of, called, captured, error, raised

pytestmark = pytest.mark.slow

KEYS = 22  # the text and image tokens of the tiny FLUX, in a batch of two
LEFT_OUT = torch.arange(KEYS)[None] % torch.tensor([[5], [7]]) == 1


def left_out(number: float) -> Tensor:
    keys = torch.arange(KEYS)
    of_rank_1 = ((keys >= 4) & (keys < 7) | (keys >= 15)) & (torch.arange(2)[:, None] == 1)
    return torch.zeros(2, 1, 1, KEYS).double().masked_fill((LEFT_OUT | of_rank_1)[:, None, None], number)


def queries() -> Tensor:
    """Return a mask that lets each token read those before it, as regions of a prompt do in both directions."""
    return torch.ones(1, 1, KEYS, KEYS).tril().log().double()


# mask -> (its tensor, whether several ranks can split it)
MASKS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "bool": (lambda: ~LEFT_OUT[:, None, None], True),
    "expanded": (lambda: (~LEFT_OUT)[:, None, None].expand(2, 5, KEYS, KEYS), True),
    "numbers": (lambda: random((2, 1, 1, KEYS), 3) * 3, True),
    "one row": (lambda: random((1, KEYS), 3) * 3, True),
    "infinite": (lambda: left_out(-torch.inf), True),
    "lowest": (lambda: left_out(torch.finfo(torch.float64).min), True),
    "queries": (queries, False),
    "queries without a batch": (lambda: queries()[0, 0], False),
}


def masked(rank: int, world: int, device: torch.device, names: Sequence[str], strategy: str) -> list[Outputs | str]:
    body, answers = body_of(MODELS["flux"].build().to(device), world, device, strategy), list[Outputs | str]()
    for name in names:
        outputs: list[Outputs] = []
        message = raised(lambda name=name, outputs=outputs: outputs.append(called(body, with_mask(name, device))))
        answers.append(outputs[0] if outputs else message)
    return answers


def with_mask(name: str, device: torch.device | str) -> dict[str, Any]:
    mask = MASKS[name][0]().to(device)
    if name == "expanded":  # a copy to another device is whole
        mask = mask[:, :1, :1].expand(MASKS[name][0]().shape)
    return {**MODELS["flux"].arguments(device), "joint_attention_kwargs": {"attention_mask": mask}}


@cache
def truth(name: str, device: str) -> Outputs:
    whole = MODELS["flux"].whole(arguments=with_mask(name, device), device=device)
    assert error(whole, MODELS["flux"].whole(device=device)) > VISIBLE
    return tuple(x.cpu() for x in whole)


WAYS = [
    (1, "ulysses", ("queries", "queries without a batch", "infinite")),
    *((world, strategy, tuple(MASKS)) for world, strategy in ((2, "ring"), (3, "ulysses"))),
]


@pytest.mark.parametrize(("world", "strategy", "names"), WAYS, ids=str)
def test_masks_are_right_or_refused_on_every_rank(
    ranks: Pool, world: int, strategy: str, names: tuple[str, ...]
) -> None:
    for answers in ranks.run(world, masked, names, strategy):
        for name, got in zip(names, answers, strict=True):
            if isinstance(got, str):
                assert (world > 1, MASKS[name][1]) == (True, False), got
                assert "a mask that differs between queries or heads cannot be split" in got
            else:
                assert error(got, truth(name, ranks.device)) < TOLERANCE, name


def flagged(rank: int, world: int, device: torch.device, name: str) -> float:
    tiny = MODELS[name]
    arguments = tiny.arguments(device)
    key = next(key for key in arguments if key.endswith("mask"))
    arguments[key] = arguments[key].double()
    return error(
        called(body_of(tiny.build().to(device), world, device, "ulysses"), arguments), tiny.whole(device=device)
    )


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize(("world", "name"), [(1, "mochi"), (2, "qwen_masked"), (2, "mochi")])
def test_padding_that_is_flagged_by_numbers_is_left_out(ranks: Pool, name: str, world: int) -> None:
    assert max(ranks.run(world, flagged, name)) < TOLERANCE


def early(rank: int, world: int, device: torch.device) -> tuple[list[str], float]:
    """Return what calls of Mochi print, and the error of one whose padding is before its tokens."""
    tiny = MODELS["mochi"]
    module, arguments, name = tiny.build().to(device), tiny.arguments(device), NAMES["mochi"]
    call = body_of(module, world, device, "ulysses")
    printed = list[str]()
    for mask in (arguments[name], arguments[name].flip(1), arguments[name].flip(1)):
        with redirect_stdout(io.StringIO()) as shown, StayDouble():
            got = call(**{**arguments, name: mask}, return_dict=False)[0].clone()
        printed.append(shown.getvalue())
    call.release()
    return printed, error((got,), tiny.whole(arguments={**arguments, name: arguments[name].flip(1)}, device=device))


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_padding_before_tokens_where_diffusers_moves_their_outputs_is_said_once(ranks: Pool) -> None:
    (first, off), (other, _) = ranks.run(2, early)
    assert [bool(text) for text in first] == [False, True, False]
    assert first[1].startswith("seqpar: encoder_attention_mask has padding before tokens of the text: diffusers' Mochi")
    assert not any(other)
    assert off > VISIBLE  # the line is true


def packed(rank: int, world: int, device: torch.device) -> tuple[float, float, str]:
    """Return the errors of Ideogram's image and of its padding, and the error for two samples in a row."""
    tiny = MODELS["ideogram4"]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    arguments["segment_ids"] = torch.where(torch.arange(21) < torch.tensor([[0], [3]]), -1, 1).to(device)
    call, whole = body_of(module, world, device, "ulysses"), tiny.whole(None, arguments, device)[0]
    with StayDouble():
        got = call(**arguments, return_dict=False)[0].clone()
    two = torch.where(torch.arange(21) < 10, 0, 1).expand(2, -1).to(device)
    message = raised(lambda: call(**{**arguments, "segment_ids": two}, return_dict=False))
    call.release()
    return error(got[:, 6:], whole[:, 6:]), error(got[1, :3], whole[1, :3]), message


@pytest.mark.parametrize("world", [1, 2])
def test_no_token_of_a_packed_sequence_reads_padding(ranks: Pool, world: int) -> None:
    for of_image, of_padding, message in ranks.run(world, packed):
        assert of_image < TOLERANCE
        assert of_padding > VISIBLE  # which the page says
        assert "segment_ids has several samples in a row" in message


def test_the_reference_adds_a_bias_as_kernels_do() -> None:
    q, k, v = (random((2, 5, 3, 4), seed) for seed in range(3))
    for bias in (random((2, 5), 4), key_bias(LEFT_OUT[:, :5], torch.float64)):
        got, wanted = (local.attend(q, k, v, bias) for local in (reference, sdpa))
        assert max((x - y).abs().max().item() for x, y in zip(got, wanted, strict=True)) < TOLERANCE


# Masks that leave no key out ---------------------------------------------------------------------------------------

NAMES = {
    "qwen_masked": "encoder_hidden_states_mask",
    "mochi": "encoder_attention_mask",
    "ltx": "encoder_attention_mask",
}


def padding(name: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
    partial = MODELS[name].arguments(device)[NAMES[name]]
    return torch.ones_like(partial), partial


@cache
def by_one(name: str, full: bool, device: str) -> Outputs:
    arguments = {**MODELS[name].arguments(device), NAMES[name]: padding(name, device)[not full]}
    return tuple(x.cpu() for x in MODELS[name].whole(arguments=arguments, device=device))


FAULTS: dict[str, Callable[..., int]] = {
    "every mask is full": lambda self, mask, read, key: 1,
    "writes are not seen": lambda self, mask, read, key: self._cached.setdefault(mask, int(bool(mask.all()))),
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(Preparation, "_read", FAULTS[fault])
        yield


@contextmanager
def reads() -> Iterator[list[Tensor]]:
    """Note which tensors the host asks whether they are true, which waits for a GPU."""
    asked, ask = list[Tensor](), Tensor.__bool__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__bool__", lambda x: (asked.append(x), ask(x))[1])
        yield asked


# the call's mask, what is written to it before -> whether rank 0's is full, how often rank 0 reads it
STORY = {
    ("none", None): (True, 0),
    ("mask", "full"): (True, 1),
    ("mask", None): (True, 0),
    ("copy", None): (True, 1),
    ("mask", "partial"): (False, 1),
    ("mask", "partial again"): (False, 1),
    ("mask", "full again"): (True, 1),
}


def story(
    rank: int, world: int, device: torch.device, name: str, fault: str | None = None
) -> tuple[list[Outputs], list[int], int]:
    """Return the results of the calls of `STORY`, how often the host read a mask in each, and the number of graphs.

    The masks of ranks but the first are partial where rank 0's are full, and full where they are partial.
    """
    tiny, (full, partial) = MODELS[name], padding(name, device)
    call, captures = captured(body_of(tiny.build().to(device), world, device, "ulysses", fused=True))
    masks: dict[str, Any] = {"none": None, "mask": full.clone(), "copy": (partial, full)[rank == 0].clone()}
    results, counts = list[Outputs](), list[int]()
    with planted(fault):
        for which, written in (one for one in STORY if one[0] != "none" or name != "mochi"):
            if written is not None:
                masks["mask"].copy_((partial, full)[written.startswith("full") == (rank == 0)])
            with reads() as asked:
                outputs = call(**{**tiny.arguments(device), NAMES[name]: masks[which]}, return_dict=False)
            results.append(tuple(x.clone() for x in outputs))
            counts.append(len(asked))
    call.release()
    return results, counts, len(captures.made)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize(("world", "name"), [(1, "qwen_masked"), (3, "qwen_masked"), (2, "mochi"), (2, "ltx")])
def test_a_mask_that_leaves_no_key_out_is_dropped_as_rank_0_decides(ranks: Pool, world: int, name: str) -> None:
    steps = [steps for step, steps in STORY.items() if step[0] != "none" or name != "mochi"]
    for rank, (results, counts, graphs) in enumerate(ranks.run(world, story, name)):
        for (full, _), outputs in zip(steps, results, strict=True):
            assert error(outputs, by_one(name, full, ranks.device)) < TOLERANCE
            assert not full or all(map(torch.equal, outputs, results[0]))
        assert counts == [read if rank == 0 else 0 for _, read in steps]
        assert graphs == 2  # with a mask and without one


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_a_dropped_mask_shows(ranks: Pool, fault: str) -> None:
    results, _, _ = story(0, 1, torch.device(ranks.device), "qwen_masked", fault)
    assert error(tuple(x.cpu() for x in results[4]), by_one("qwen_masked", False, ranks.device)) > VISIBLE


def guided(rank: int, world: int, device: torch.device, first: bool) -> tuple[list[Outputs], list[bool]]:
    tiny = MODELS["qwen_masked"]
    module, masks = tiny.build().to(device), padding("qwen_masked", device)
    seqpar.parallelize(module, make_mesh(device, cfg=2))
    in_double(module)
    results, promised = list[Outputs](), list[bool]()
    for _ in range(3):  # the first shows pairs of calls, which the next ones promise
        given, step = tiny.arguments(device), list[Any]()
        for branch, full in (("cond", first), ("uncond", not first)):
            mask = masks[full != (rank == 0)]
            with module.cache_context(branch), StayDouble():
                step += module(**{**given, NAMES["qwen_masked"]: mask}, return_dict=False)
        promised.append(isinstance(step[0], DeferredResult))
        results.append(tuple(x + 0 for x in step))
    seqpar.release(module)
    return results, promised


@pytest.mark.parametrize(("world", "first"), [(2, True), (4, False)])
def test_branches_of_which_one_has_a_full_mask_are_computed_together(ranks: Pool, world: int, first: bool) -> None:
    wanted = [*by_one("qwen_masked", first, ranks.device), *by_one("qwen_masked", not first, ranks.device)]
    assert error((wanted[0],), (wanted[1],)) > VISIBLE
    for results, promised in ranks.run(world, guided, first):
        assert max(error(step, tuple(wanted)) for step in results) < TOLERANCE
        assert promised == [False, True, True]


# Padding that is left out ------------------------------------------------------------------------------------------

# model, batch -> how many tokens of its text are computed, whether keys are masked
CUT = {
    ("hunyuan", 1): (19, False),
    ("hunyuan", 2): (19, True),
    ("hunyuan15", 1): (8, False),
    ("hunyuan15", 2): (8 + 2, True),
    ("hunyuan15_i2v", 1): (3 + 8, False),
    ("hunyuan15_i2v", 3): (3 + 4 + 8, True),
    ("krea2", 1): (5, False),
    ("krea2", 2): (5, True),
}


def with_padding(name: str, batch: int, device: torch.device | str) -> dict[str, Any]:
    """Return arguments whose texts have padding at their end, or, for Krea 2, in the middle."""
    arguments = replace(MODELS[name], batch=batch).arguments(device)
    if name == "hunyuan":
        arguments["encoder_hidden_states"] = random((batch, 23, 24), 2, device)
        arguments["encoder_attention_mask"] = (padded(batch, 20).long() @ torch.eye(20, 23).long()).to(device)
    if name == "krea2":
        arguments["encoder_attention_mask"][:, 2:4] = False
    return arguments


def cut_off(rank: int, world: int, device: torch.device) -> dict[tuple[str, int], tuple[float, int, bool]]:
    """Return, for each case of `CUT`, the error of a second call, the text's tokens, and whether keys were masked."""
    results = {}
    for name, batch in CUT:
        module, arguments = MODELS[name].build().to(device), with_padding(name, batch, device)
        call, _ = captured(body_of(module, world, device, "kv_gather", fused=batch < 3))
        whole, last = MODELS[name].whole(None, arguments, device), call.state
        outputs = [flat(call(**arguments, return_dict=False)) for _ in range(2)][-1]
        results[name, batch] = error(outputs, whole), last.lengths.get("text", 0), bool(last.masks)
        call.release()
    return results


@pytest.mark.parametrize("world", [1, 3])
def test_padding_of_texts_is_not_computed(ranks: Pool, world: int) -> None:
    for results in ranks.run(world, cut_off):
        for which, (wrong, text, masked) in results.items():
            assert wrong < TOLERANCE, which
            assert (text, masked) == CUT[which], which


@pytest.mark.parametrize("fault", [False, True])
def test_padding_between_tokens_that_have_places_stays(monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """Tokens that come closer together would get another's place; the fault leaves their places unread."""
    tiny, arguments = MODELS["krea2"], with_padding("krea2", 1, "cpu")
    arguments["position_ids"][:7, 1] = torch.arange(7)
    module = tiny.build()
    if fault:
        monkeypatch.setattr(krea2, "_are_equal", lambda rows: 1)
    call, _ = captured(body_of(module, 1, torch.device("cpu"), "ulysses"))
    wrong = error(flat(call(**arguments, return_dict=False)), tiny.whole(None, arguments))
    assert (wrong > VISIBLE) if fault else (wrong < TOLERANCE)
    assert (call.state.lengths["text"], bool(call.state.masks)) == ((5, False) if fault else (7, True))
    call.release()


@pytest.mark.parametrize("name", ["krea2", "hunyuan"])
def test_as_many_tokens_of_a_text_stay_as_ranks_need(name: str) -> None:
    arguments, tokens = MODELS[name].inputs(1), 9
    arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"][:, :1].repeat_interleave(tokens, dim=1)
    arguments["encoder_attention_mask"] = (torch.arange(tokens) < 5)[None]
    if name == "krea2":
        arguments["position_ids"] = torch.zeros(tokens + 15, 3)
    form, cuts = form_of(arguments), CUTS[MODELS[name].kind]
    for ranks, exact in ((1, False), (6, False), (1, True), (6, True)):
        preparation, stay = Preparation(cuts, ranks, exact), tokens if exact else max(5, ranks)
        short = preparation.apply(form, preparation.read(form))[0].whole
        assert short["encoder_hidden_states"].shape[1] == stay
        assert short["encoder_attention_mask"].tolist() == [[True] * 5 + [False] * (stay - 5)]
        assert name != "krea2" or len(short["position_ids"]) == stay + 15


def as_floats(mask: Tensor, valid: float, padding: float) -> Tensor:
    return torch.where(mask != 0, valid, padding).double()


# model, its mask in another form -> why it is refused; None: it is right
FORMS: list[tuple[str, Callable[[Tensor], Tensor], str | None]] = [
    # with a dim between a mask is no text that would be valid as a whole; diffusers takes none, and we know its meaning
    ("krea2", lambda mask: mask.view(1, 1, 7), None),
    ("krea2", lambda mask: mask.view(1, 1, 1, 7), None),
    # numbers that are added to scores are 0 for a token, which nothing tells from padding
    ("krea2", lambda mask: as_floats(mask, 1, 0), "encoder_attention_mask is floating"),
    ("krea2", lambda mask: as_floats(mask, 0, 1), "encoder_attention_mask is floating"),
    ("krea2", lambda mask: as_floats(mask, 0, -1e9), "encoder_attention_mask is floating"),
    ("chroma", lambda mask: as_floats(mask, 1, 0.5), "attention_mask has numbers other than 0 and 1"),
    # LTX adds them to the scores; without a zero they must not count as masks that leave no key out
    ("ltx", lambda mask: as_floats(mask, 1, 0.5), None),
    ("ltx2", lambda mask: as_floats(mask, 1, 0.5), None),
    ("ltx", lambda mask: random((2, 1, 9), 5).abs() * -3 - 0.1, None),
]


@pytest.mark.parametrize(("name", "form", "refused"), FORMS)
def test_masks_of_other_forms_are_right_or_refused(
    name: str, form: Callable[[Tensor], Tensor], refused: str | None
) -> None:
    tiny = MODELS[name]
    arguments = with_padding("krea2", 1, "cpu") if name == "krea2" else tiny.arguments()
    key = "attention_mask" if name == "chroma" else "encoder_attention_mask"
    given = {**arguments, key: form(arguments[key])}
    module = seqpar.parallelize(tiny.build(), Mesh.single())
    in_double(module)
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            module(**given, return_dict=False)
        return
    with StayDouble():
        got = flat(module(**given, return_dict=False))
    assert error(got, tiny.whole(arguments=arguments if name == "krea2" else given)) < TOLERANCE
    assert error(got, tiny.whole(arguments={**given, key: None})) > VISIBLE


# Chroma's mask of floating numbers, as its pipeline makes it: attention weighs padding, without a mask

TEXT, IMAGE = 7, 15  # tokens of the tiny Chroma
# kind of mask -> the tokens that are zeros in it, in all rows or in the first one
ZEROS: dict[str, tuple[int, ...]] = {
    "alike": (4, 5, 6),
    "all": tuple(range(TEXT)),
    "two": (5, 6),
    "one": (6,),  # not every kernel attends to one key
    "unlike": (5, 6),
    "in the middle": (3, 4),
    "in the image": (-2, -1),
    "in both": (5, 6, 7),
    "apart": (5, 10),
    "bool": (5, 6),
}
WEIGHED = {"alike": 3, "all": 7, "two": 2}  # how many tokens of padding attention weighs; others get masks


def mask_of(kind: str, batch: int) -> Tensor:
    mask = torch.ones(batch, TEXT + IMAGE).double()
    mask[: 1 if kind == "unlike" else batch, list(ZEROS[kind])] = 0
    return mask.bool() if kind == "bool" else mask


def chroma(kind: str, device: torch.device | str, batch: int = 2) -> dict[str, Any]:
    tiny = replace(MODELS["chroma"], batch=batch)
    return {**tiny.arguments(device), "attention_mask": mask_of(kind, batch).to(device)}


@cache
def chroma_truth(kind: str, batch: int, device: str) -> Outputs:
    return MODELS["chroma"].whole(None, chroma(kind, device, batch), device)


def weighed(
    rank: int, world: int, device: torch.device, strategy: str, kinds: tuple[str, ...], fused: bool
) -> tuple[dict[str, tuple[float, int, bool]], str]:
    """Return, for each kind, the error of a second call, the padding that was weighed, and whether keys were masked.

    Besides return what this rank has printed.
    """
    module = MODELS["chroma"].build().to(device)
    call, _ = captured(body_of(module, world, device, strategy, fused=fused))
    results, printed = {}, io.StringIO()
    for number, kind in enumerate(kinds):
        given = chroma(kind, device, 2 if kind == "unlike" else 1 + number // 3 % 3)
        with redirect_stdout(printed):
            outputs = [flat(call(**given, return_dict=False)) for _ in range(2)][-1]
        last = call.state
        results[kind] = (
            error(outputs, chroma_truth(kind, len(given["hidden_states"]), str(device))),
            last.padding,
            bool(last.masks),
        )
    call.release()
    return results, printed.getvalue()


WEIGHING = [("kv_gather", 1, True), *covering(LAYOUTS, turns=(pytest.param(2, False), pytest.param(3, True)))]


@pytest.mark.parametrize(("strategy", "world", "fused"), WEIGHING)
def test_padding_is_weighed_or_masked_as_torch_adds_a_mask(ranks: Pool, world: int, strategy: str, fused: bool) -> None:
    """Strategies that merge the results of ranks always get a mask. Rank 0 says so once.

    Kinds follow each other whose tensors have the same shapes, so that a call is not taken for one of another kind.
    """
    merges = strategy not in EXACT
    kinds = ("alike", "unlike", "in both", "bool") if merges else tuple(ZEROS)
    if world > 1 and not merges:  # strategies take turns; one rank has all kinds
        kinds = kinds[EXACT.index(strategy) % 2 :: 2]
    answers = ranks.run(world, weighed, strategy, kinds, fused)
    for results, _ in answers:
        for kind, (wrong, padding, masked) in results.items():
            assert wrong < TOLERANCE, kind
            assert padding == (0 if merges else WEIGHED.get(kind, 0)), kind
            assert masked == (not padding), kind
    reason = f"{strategy} merges the results of ranks" if merges else UNLIKE
    assert [printed.count(f"a second attention in each block, because {reason}") for _, printed in answers] == [
        int(rank == 0) for rank in range(world)
    ]


def test_negative_controls_other_masks_give_other_results() -> None:
    device = torch.device("cpu")
    given = chroma("alike", device)
    wanted = MODELS["chroma"].whole(None, given, device)
    for mask in (None, given["attention_mask"].bool(), mask_of("two", 2)):
        assert error(MODELS["chroma"].whole(None, {**given, "attention_mask": mask}, device), wanted) > VISIBLE


def one_call(world: int, device: torch.device) -> Any:
    return captured(body_of(MODELS["chroma"].build().to(device), world, device, "kv_gather", fused=True))[0]


def test_what_was_read_of_a_mask_counts_until_it_is_written_and_for_texts_of_its_length() -> None:
    device = torch.device("cpu")
    call, given = one_call(1, device), chroma("alike", device)
    shorter = {"encoder_hidden_states": given["encoder_hidden_states"][:, :6], "txt_ids": given["txt_ids"][:6]}
    longer = {"hidden_states": torch.cat([given["hidden_states"], given["hidden_states"][:, :1]], dim=1)}
    longer |= {"img_ids": torch.cat([given["img_ids"], given["img_ids"][:1]])}
    for padding, change in ((3, {}), (2, {}), (0, shorter | longer), (2, {})):
        given["attention_mask"].copy_(mask_of("two", 2)) if padding == 2 else None
        now = {**given, **change}
        outputs = flat(call(**now, return_dict=False))
        assert error(outputs, MODELS["chroma"].whole(None, now, device)) < TOLERANCE
        assert call.state.padding == padding
    call.release()


def verified(rank: int, world: int, device: torch.device, fault: bool) -> str:
    module = MODELS["chroma"].build().float().to(device)
    given = cast(chroma("alike", device), torch.float64, torch.float32)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), strategy="ulysses")
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(ByPadding, "_added_to", lambda core, q: torch.zeros((), device=q.device))
        try:
            return str(seqpar.verify(module, **given).finding)
        except VerificationError as error:
            return str(error)
        finally:
            seqpar.release(module)


@pytest.mark.parametrize("fault", [False, True])
def test_verifying_compares_attention_that_weighs_padding(ranks: Pool, fault: bool) -> None:
    for finding in ranks.run(2, verified, fault):
        assert ("transformer_blocks.0, output" in finding) if fault else (finding == "None")


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the messages for masks of other tokens or rows than the call has; each is refused in the first call."""
    call, messages, whole = one_call(world, device), [], mask_of("alike", 3).to(device)
    for mask in (whole[:2, :TEXT], torch.cat([whole, whole[:, -4:]], dim=1)[:2], whole, whole[0]):
        with pytest.raises(ValueError, match=r"got .*mask") as caught:
            call(**{**chroma("alike", device), "attention_mask": mask}, return_dict=False)
        messages.append(str(caught.value))
    call.release()
    return messages


def test_masks_of_other_tokens_or_rows_are_refused_on_all_ranks_alike(ranks: Pool) -> None:
    words = ("mask for 7 keys, expected 22", "mask for 26 keys, expected 22", "masks of 3 rows for 2", "of shape (22,)")
    first, second = ranks.run(2, refused)
    assert first == second
    assert all(word in message for word, message in zip(words, first, strict=True)), first


def chroma_guided(rank: int, world: int, device: torch.device, axes: dict[str, int]) -> tuple[list[Tensor], int]:
    module, strategy = MODELS["chroma"].build().to(device), "ulysses"
    seqpar.parallelize(module, make_mesh(device, **axes), strategy=strategy)
    in_double(module)
    call: Any = vars(module)["forward"]
    call.graphs = Graphs(call.mesh, Captures(), call.check_delivered)
    outs = [x.clone() for x in chroma_steps(module, device)]
    count = len(call.graphs)
    seqpar.release(module)
    return outs, count


def chroma_steps(module: Any, device: torch.device) -> list[Tensor]:
    results = []
    with torch.no_grad(), StayDouble():
        for step in range(4):
            latents = random((1, IMAGE, 8), 77 + step, device)
            both = [
                module(**{**chroma(kind, device, 1), "hidden_states": latents}, return_dict=False)[0]
                for kind in ("alike", "two")
            ]
            results += [one + 0 for one in both]
    return results


@pytest.mark.parametrize("axes", [{}, {"cfg": 2}, {"cfg": 2, "ulysses": 2}], ids=str)
def test_branches_whose_texts_have_other_padding_are_calls_of_other_kinds(ranks: Pool, axes: dict[str, int]) -> None:
    wanted = chroma_steps(MODELS["chroma"].build().to(ranks.device), torch.device(ranks.device))
    for outs, count in ranks.run(math.prod(axes.values()), chroma_guided, axes):
        assert error(tuple(x.cpu() for x in outs), tuple(x.cpu() for x in wanted)) < TOLERANCE
        assert count == (1 if "cfg" in axes else 2)
