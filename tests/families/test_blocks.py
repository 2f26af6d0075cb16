"""Tests that blocks with fused kernels equal diffusers' own blocks, for every family in `seqpar/families`.

The truth is the unchanged transformer in one process, without its roundings to fp32 (`StayDouble`); with them, it is
1e-6 away. Every comparison also counts the calls of the functions: one that does not run cannot be right.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from numpy import s_
from peft import LoraConfig
from torch import Tensor

import seqpar
from seqpar.families import flux3, minimax_h3, z_image
from seqpar.families._cuts import Cuts, Joint
from seqpar.families._find import BLOCKS, CUTS
from seqpar.families._find import FUSED as FILES_WITH_BLOCKS
from seqpar.kernels import adaln, prepare
from seqpar.transformer import blocks as adopt
from seqpar.transformer.attention import ShardedAttention
from seqpar.transformer.blocks import NO_ROOM, BlockHook, FusedBlocks
from tests.support.diffusers_tiny import MODELS, Tiny, as_built, few, flat, kept, moved, random, residuals, short_truth
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import LAYOUTS, TRANSPORTS
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, Outputs, body_of, called, computed, error
from tests.transformer.test_lora import add, step

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # peft warns of a second adapter
ROUNDED = 1e-6
# how the classes begin whose blocks have functions
KINDS = (
    *("Chroma", "CogVideoX", "Flux", "HunyuanVideo", "Krea2", "LTX"),
    *("MiniMaxH3", "QwenImageT", "SD3", "Wan", "ZImage"),
)
FUSED = [name for name, tiny in MODELS.items() if tiny.kind.startswith(KINDS) and tiny.splits]
# whose blocks join a text of any length: that of FLUX.3 and Krea 2 attends to itself, too, and CogVideoX 2B has the
# positions of one length
TEXTS = [
    name
    for name in FUSED
    if not (
        name == "cogvideox_2b"
        or MODELS[name].kind.startswith(("HunyuanVideoT", "Krea2", "LTX", "MiniMaxH3", "Wan", "ZImage", "Flux3"))
    )
]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Count the calls of all functions of blocks, by the names of the blocks' classes."""
    calls: list[str] = []

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(kind), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        for kind, block in BLOCKS.items():
            patch.setitem(BLOCKS, kind, replace(block, compute=counting(kind, block.compute)))
        yield calls


JOINT = ("flux", "flux2", "qwen", "qwen_masked", "qwen_edit", "sd3_dual", "cogvideox", "mochi")
# each strategy and transport: a tenth of the models by functions, and one by diffusers' own blocks
FEW = [
    (3 + index % 2, strategy, transport, index, JOINT[index % len(JOINT)])
    for index, (strategy, transport) in enumerate(product(LAYOUTS, TRANSPORTS))
]


def with_few(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, first: int, plain: str
) -> dict[tuple[str, bool, int], tuple[Outputs, list[str]]]:
    """Return the outputs of calls with texts of one and two tokens, of the latter those of the second, and what ran."""
    results = {}
    for name, fused in [*((name, True) for name in TEXTS[first::10]), (plain, False)]:
        with counted() as calls:
            body = body_of(kept(name, str(device)), world, device, strategy, transport, fused=fused)
            for tokens in (2, 1, 2):
                calls.clear()
                results[name, fused, tokens] = called(body, few(MODELS[name].arguments(device), tokens)), list(calls)
            body.release()
    return results


@pytest.mark.parametrize(("world", "strategy", "transport", "first", "plain"), FEW)
def test_ranks_without_tokens_of_the_text_are_right(
    ranks: Pool, world: int, strategy: str, transport: str, first: int, plain: str
) -> None:
    for results in ranks.run(world, with_few, strategy, transport, first, plain):
        for (name, fused, tokens), (outputs, calls) in results.items():
            assert error(outputs, short_truth(name, ranks.device, tokens)) < TOLERANCE, (name, fused, tokens)
            assert calls == (blocks_named(name) if fused else []), name


@cache
def blocks_named(name: str) -> list[str]:
    return blocks_of(MODELS[name])


def blocks_of(tiny: Tiny) -> list[str]:
    unused = tiny.unused or "none"
    named = [(type(one).__name__, one) for path, one in tiny.build().named_modules() if not path.startswith(unused)]
    return [kind for kind, one in named if kind in BLOCKS and BLOCKS[kind].why_not(one) is None]


def test_every_family_is_tested() -> None:
    assert {kind for name in FUSED for kind in blocks_named(name)} == set(BLOCKS)


def cast(value: Any, before: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: cast(x, before, dtype) for key, x in value.items()}
    if isinstance(value, list):
        return [cast(x, before, dtype) for x in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == before else value


def one_rank(module: Any, arguments: dict[str, Any], on: bool) -> Outputs:
    device = next(module.parameters()).device
    body = body_of(module, 1, device, "ulysses", fused=on)
    outputs = tuple(x.clone().double() for x in flat(computed(body, arguments)))
    body.release()
    return outputs


def rms(got: Outputs, wanted: Outputs) -> float:
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(got, wanted, strict=True))


# models whose blocks compute as those of another model of their class do
ALIKE = (
    *("flux_controlnet", "flux_fill", "qwen_layered", "sd3_controlnet", "wan_like_lengths"),
    *("chronoedit", "wananimate", "qwen_controlnet", "z_image_controlnet"),
)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # FLUX.3 and Krea 2 round to fp32
@pytest.mark.parametrize("name", [name for name in FUSED if name not in ALIKE])
def test_rounded_blocks_are_as_near_as_diffusers_own(ranks: Pool, name: str) -> None:
    """Diffusers rounds to fp32 inside; in bf16 fused blocks may not be further from the exact result than its own."""
    tiny, device = MODELS[name], ranks.device
    assert 0 < error(*(one_rank(kept(name, device), tiny.arguments(device), on) for on in (True, False))) < ROUNDED
    given, errors = cast(tiny.arguments(device), torch.float64, torch.bfloat16), {True: 0.0, False: 0.0}
    for seed in range(2):
        module = tiny.build(seed).to(device)
        narrow = {key: x.bfloat16() for key, x in module.named_parameters()}
        for key, x in module.named_parameters():
            x.copy_(narrow[key])
        wide = cast(given, torch.bfloat16, torch.float64)
        wanted = tiny.whole(module, wide, device)
        for key, x in module.named_parameters():
            stays = any(word in key for word in module._keep_in_fp32_modules or ())
            x.data = narrow[key].float() if stays else narrow[key]
        for on in errors:
            errors[on] += rms(one_rank(as_built(module), given, on), wanted)
    assert errors[True] <= 1.1 * errors[False], errors


# model -> what makes it smaller, and the parts of its arguments for a row of five patches: without a GPU kernels are
# interpreted
TOKENS, FRAMES, IMAGE = s_[:, :5], s_[:, :, :1, :2], s_[:, :, :2]
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chroma": (
        {"num_layers": 1, "num_single_layers": 1},
        {"hidden_states": TOKENS, "img_ids": s_[:5], "attention_mask": s_[:, :12]},
    ),
    "cogvideox": ({}, {"hidden_states": s_[:, :1, :, :2], "image_rotary_emb": s_[:5]}),
    "flux": ({"num_single_layers": 1}, {"hidden_states": TOKENS, "img_ids": s_[:5]}),
    "krea2": ({}, {"hidden_states": TOKENS, "position_ids": s_[:12]}),
    "hunyuan": ({"num_layers": 1, "num_single_layers": 1}, {"hidden_states": FRAMES}),
    "hunyuan15_i2v": ({"num_layers": 1}, {"hidden_states": FRAMES}),
    "ltx_per_token": ({"num_layers": 1}, {"hidden_states": s_[:, :15], "timestep": s_[:, :15], "num_frames": 1}),
    "ltx2_3": ({"num_layers": 2}, {"hidden_states": s_[:, :15], "timestep": s_[:, :15], "num_frames": 1}),
    "minimax_h3": ({}, {}),
    "sd3_dual": ({}, {"hidden_states": IMAGE}),
    "wan2.2": ({"num_layers": 1}, {"hidden_states": FRAMES, "timestep": TOKENS}),
    "wan_vace": (
        {"num_layers": 1, "vace_layers": [0]},
        {"hidden_states": FRAMES, "control_hidden_states": FRAMES, "control_hidden_states_scale": s_[:1]},
    ),
    "z_image": ({"n_layers": 1, "n_refiner_layers": 1}, {}),
}


def part(value: Any, index: Any) -> Any:
    if isinstance(index, int):
        return index
    return tuple(x[index] for x in value) if isinstance(value, tuple) else value[index]


@pytest.mark.parametrize("name", SMALL)
def test_blocks_pass_layouts_that_kernels_take(ranks: Pool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Kernels read rows in place and refuse layouts that their references take."""
    launched: list[int] = []
    for file in (adaln, prepare):
        monkeypatch.setattr(file, "fused", lambda *tensors: (launched.append(1), True)[1])
    config, parts = SMALL[name]
    tiny, device = replace(MODELS[name].having(**config), batch=1), ranks.device
    given = tiny.arguments(device)
    given |= {key: part(given[key], index) for key, index in parts.items()}
    got = one_rank(tiny.build().float().to(device), cast(given, torch.float64, torch.float32), True)
    assert rms(got, tiny.whole(None, given, device)) < VISIBLE
    assert len(launched) > 3 * len(blocks_of(tiny))


# Calls of other forms ------------------------------------------------------------------------------------------


def one_timestep(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"timestep": given["timestep"][:1]}


def timesteps(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what gives the tokens of MiniMax-H3 so many timesteps, in turn."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        indices = torch.arange(len(given["token_tags"])) % count
        return given | {"timestep": torch.linspace(0.2, 0.9, count).double(), "timestep_indices": indices}

    return change


def with_reference(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of Z-Image Omni, whose tokens of a reference image have another timestep."""
    pictures, texts = (
        [random(shape, seed + i) for i in range(2)] for shape, seed in (((4, 1, 6, 10), 1), ((5, 24), 7))
    )
    omni = {"siglip_feats": [None], "image_noise_mask": [[0, 1]]}
    return {"x": [pictures], "cap_feats": [texts], "t": torch.full((1,), 0.4).double(), **omni}


KNOWN = CUTS["HunyuanVideoTransformer3DModel"]
MASKLESS = Cuts(KNOWN.places, dict.fromkeys(KNOWN.attention, Joint(("image", "text"))), local=KNOWN.local)
Z_IMAGE = MODELS["z_image"]
# model, what is changed in its arguments, and what is printed where diffusers' own blocks compute
CALLS: dict[str, tuple[Tiny, Callable[[dict[str, Any]], dict[str, Any]], str | None]] = {
    # reference images have the timestep of the second row then, in every picture
    "one timestep for all pictures": (MODELS["qwen_edit"], one_timestep, None),
    "one timestep for all videos": (MODELS["cogvideox"], one_timestep, None),
    # whose texts differ in their lengths: each has its own rotary rows
    "three pictures": (replace(Z_IMAGE, batch=3), dict, None),
    "one picture": (replace(Z_IMAGE, batch=1), dict, None),
    "two timesteps": (Z_IMAGE, with_reference, "because its tokens have one of two timesteps"),
    # each kind of token has rows of its own for each of them
    "one timestep for all tokens": (MODELS["minimax_h3"], timesteps(1), None),
    "three timesteps": (MODELS["minimax_h3"], timesteps(3), None),
    # the input that a block has left for the next one is not used: the next one is given another tensor
    "residuals of a ControlNet": (
        MODELS["qwen"],
        lambda given: {**given, "controlnet_block_samples": residuals(80, 2)(1)},
        None,
    ),
    "options for attention": (
        MODELS["qwen"],
        lambda given: {**given, "attention_kwargs": {"attention_mask": None}},
        "because attention has the arguments attention_mask",
    ),
    # by a user's cuts, which name no mask, attention takes the mask that blocks are given
    "a mask of the blocks": (MODELS["hunyuan"], dict, None),
}


def of_other_form(rank: int, world: int, device: torch.device, name: str) -> Outputs:
    tiny, change, _ = CALLS[name]
    cuts = MASKLESS if name == "a mask of the blocks" else None
    body = body_of(tiny.build().to(device), world, device, "kv_gather", fused=True, cuts=cuts)
    return called(body, moved(change(tiny.arguments()), device))


@cache
def true_form(name: str, device: str) -> Outputs:
    tiny, change, _ = CALLS[name]
    return tuple(x.cpu() for x in tiny.whole(None, moved(change(tiny.arguments()), device), device))


@pytest.mark.parametrize(("world", "name"), [(2 + index % 2, name) for index, name in enumerate(CALLS)])
def test_calls_of_other_forms_are_right(ranks: Pool, capfd: pytest.CaptureFixture[str], world: int, name: str) -> None:
    for outputs in [*ranks.run(world, of_other_form, name), *ranks.run(1, of_other_form, name)]:
        assert error(outputs, true_form(name, ranks.device)) < TOLERANCE
    assert (CALLS[name][-1] or "") in capfd.readouterr().out


def any_of_this_shape(self: BlockHook, x: Tensor) -> Tensor | None:
    left = self._state.handed.values() if self._state.active else ()
    return next((h for _, h, _ in left if h.shape == x.shape), None)


# the call of another form in which a fault shows
FAULTS: dict[str, tuple[str, object, str, Callable[[Any], Any]]] = {
    "a mask that is not passed on": (
        "three pictures",
        ShardedAttention,
        "of_streams",
        lambda own: lambda self, streams, beside=None, mask=None, **eight: own(self, streams, beside, **eight),
    ),
    "the first picture's rotary rows": (
        "three pictures",
        z_image,
        "by_head",
        lambda own: lambda q, k, cos, sin: own(q, k, cos[:1], sin[:1]),
    ),
    "a branch without its norm": ("three pictures", z_image, "_branch_norm", lambda own: lambda norm: None),
    "modulation of another kind of token and timestep": (
        "three timesteps",
        minimax_h3,
        "_modulation",
        lambda own: (
            lambda call, temb, x: [
                [rows_RE.unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1) for rows_RE in rows]
                for rows in own(call, temb, x)
            ]
        ),
    ),
    "an input made of another tensor": (
        "residuals of a ControlNet",
        BlockHook,
        "handed",
        lambda own: any_of_this_shape,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_a_fault_shows(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, place, function, change = FAULTS[fault]
    monkeypatch.setattr(place, function, change(getattr(place, function)))
    assert error(of_other_form(0, 1, torch.device("cpu"), name), true_form(name, "cpu")) > VISIBLE


def with_a_block_skipped(
    rank: int, world: int, device: torch.device, dual: tuple[int, ...]
) -> tuple[float, float, int]:
    """Return the error where the second of four blocks is skipped, how much that matters, and the functions' calls.

    dual: the blocks with attention of the image alone.
    """
    tiny = replace(MODELS["sd3_dual"], config={**MODELS["sd3"].config, "num_layers": 4, "dual_attention_layers": dual})
    whole, arguments = tiny.build().to(device), tiny.arguments(device)
    every = tiny.whole(whole, arguments, device)
    arguments |= {"skip_layers": [1]}
    wanted = tiny.whole(whole, arguments, device)
    with counted() as calls:
        body = body_of(tiny.build().to(device), world, device, "kv_gather", fused=True)
        got = called(body, arguments)
    return error(got, wanted), error(wanted, every), len(calls)


@pytest.mark.parametrize(("world", "dual"), [(1, ()), (2, (0, 2)), (3, (1, 3))])
def test_a_block_after_a_skipped_one_has_its_own_modulation(ranks: Pool, world: int, dual: tuple[int, ...]) -> None:
    """The block before the skipped one has left it an input, for the very tensor that the next block is given."""
    for wrong, matters, calls in ranks.run(world, with_a_block_skipped, dual):
        assert wrong < TOLERANCE
        assert matters > VISIBLE
        assert calls == 3


@pytest.mark.parametrize(
    ("norm", "chunks", "why"),
    [("rms_norm", True, "they compute their MLPs in chunks"), ("layer_norm", False, "q and k have a LayerNorm")],
)
def test_other_blocks_of_stable_diffusion_3_are_left_to_diffusers_own(norm: str, chunks: bool, why: str) -> None:
    tiny, device = MODELS["sd3_dual"], torch.device("cpu")
    tiny = replace(tiny, config={**tiny.config, "qk_norm": norm})
    module = tiny.build()
    if chunks:
        module.enable_forward_chunking(1, 0)
    body = body_of(module, 1, device, "ulysses", fused=True)
    got = called(body, tiny.arguments(device))
    assert error(got, tiny.whole()) < TOLERANCE
    assert body.sharded.texts()["computation"].endswith(f"2 by its own modules, because {why}")


STORY = ("load", "one", "both", "a call's scale", "scale", "disable", "enable", "delete", "unload")
FUSING = ("load", "both", "fuse safely", "unfuse", "one", "fuse", "unfuse", "unload")  # by new data, then in place
OF_A_FAMILY = ("load", "both", "a call's scale", "unload")
STORIES = [
    *((world, name, True, STORY) for world, name in ((1, "qwen"), (2, "wan"), (3, "flux"))),
    *((1, name, True, OF_A_FAMILY) for name in ("z_image", "hunyuan15", "sd3_dual")),
    *((2, name, True, OF_A_FAMILY) for name in ("krea2", "minimax_h3")),
    (2, "flux", False, STORY),
    (2, "flux", True, FUSING),
]


def story(
    rank: int, world: int, device: torch.device, name: str, fused: bool, actions: tuple[str, ...]
) -> tuple[list[tuple[float, int, str]], bool, float]:
    """Return the error after each thing that a user does with adapters, the functions' calls, and what computes.

    Then return whether the bits are at last those of the beginning, and how much adapters have changed.
    """
    tiny, answers, largest = MODELS[name], [], 0.0
    options = "joint_attention_kwargs" if name in ("flux", "sd3_dual", "z_image") else "attention_kwargs"
    module, whole = tiny.build().to(device), tiny.build().to(device)
    with counted() as calls:
        body = body_of(module, world, device, fused=fused)
        before, got, key = called(body, tiny.arguments(device)), (), body.sharded.key()
        for action in actions:
            act(module, action)
            act(whole, action)
            given = tiny.arguments(device)
            given |= {options: {"scale": 0.4}} if action == "a call's scale" else {}
            assert (body.sharded.key() != key) is (action != "a call's scale"), action
            calls.clear()
            got, wanted = called(body, given), tiny.whole(whole, copy.deepcopy(given))
            key, largest = body.sharded.key(), max(largest, error(got, before))
            answers.append((error(got, wanted), len(calls), body.sharded.texts()["computation"]))
    return answers, all(map(torch.equal, got, before)), largest


def act(module: Any, action: str) -> None:
    targets = {"a": ["to_k", "to_out.0", "net.0.proj", "w3", "to_gate", "proj_out"], "b": ["to_k", "to_q"]}
    if action == "load":
        for seed, name in enumerate(targets):
            add(module, name, LoraConfig(r=3, lora_alpha=6, target_modules=targets[name]), seed)
    elif action != "a call's scale":
        step(action, module)


@pytest.mark.parametrize(("world", "name", "fused", "actions"), STORIES)
def test_adapters_are_merged_and_unloading_restores_the_bits(
    ranks: Pool, world: int, name: str, fused: bool, actions: tuple[str, ...]
) -> None:
    count = len(blocks_named(name)) if fused else 0
    for answers, restored, largest in ranks.run(world, story, name, fused, actions):
        for action, (wrong, calls, computation) in zip(actions, answers, strict=True):
            assert wrong < TOLERANCE, action
            assert calls == count, action
            assert not fused or computation.startswith(f"{count} blocks by fused kernels")
        assert restored or actions is FUSING  # which rounds
        assert largest > VISIBLE


def test_an_adapter_that_no_product_reads_is_left_to_diffusers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    block = BLOCKS["WanTransformerBlock"]
    layers = {name: paths for name, paths in block.layers.items() if name != "down"}
    monkeypatch.setitem(BLOCKS, "WanTransformerBlock", replace(block, layers=layers))
    module, whole = MODELS["wan"].build(), MODELS["wan"].build()
    for one in (module, whole):
        one.add_adapter(LoraConfig(r=3, target_modules=["net.2"], init_lora_weights=False), "a")
        one.double()
    whole.load_state_dict(module.state_dict())
    body = body_of(module, 1, device, "ulysses", fused=True)
    got = called(body, MODELS["wan"].arguments(device))
    assert error(got, MODELS["wan"].whole(whole)) < TOLERANCE
    assert body.sharded.texts()["computation"].startswith(
        "0 blocks by fused kernels, 2 by its own modules, because an adapter"
    )


def test_the_blocks_of_a_users_own_transformer_are_its_own() -> None:
    """Its forward and the arguments of its class are not known."""
    whole, device = MODELS["wan"].build(), torch.device("cpu")
    module = MODELS["wan"].build()
    module.__class__ = type("Mine", (type(module),), {"__module__": "mine"})
    body = body_of(module, 1, device, "ulysses", fused=True)
    got = called(body, MODELS["wan"].arguments(device))
    assert error(got, MODELS["wan"].whole(whole)) < TOLERANCE
    assert body.sharded.texts()["computation"].endswith("because Mine is no class of diffusers")


def test_the_page_has_a_row_for_every_file_with_fused_blocks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    assert {*re.findall(r"^\| `(\w+)\.py` \|", page, re.MULTILINE)} == FILES_WITH_BLOCKS


def test_flux_3_reads_the_modulation_of_a_stream_once(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = flux3._by_token, list[int]()
    monkeypatch.setattr(flux3, "_by_token", lambda parts: (calls.append(len(parts)), own(parts))[1])
    tiny, device = MODELS["flux3_reference"], ranks.device
    called(body_of(tiny.build().to(device), 1, torch.device(device), fused=True), tiny.arguments(device))
    assert calls == [1, 1, 1, 2]  # of text, image and reference alone, then of all


# Adapters whose copies of weights do not fit into the memory

# what a user does -> whether copies have room, whether functions compute the blocks then, whether the reason is told
SHORT = {
    "nothing": (True, True, False),
    "load": (False, False, True),
    "both": (True, False, True),
    "unload": (True, True, False),
    "load again": (True, True, False),
    "a call's scale": (False, False, False),  # one rank computes this call; all ranks learn the reason at the next one
    "enable": (True, False, True),
}


@contextmanager
def room_for(copies: float) -> Iterator[list[ref[Tensor]]]:
    """Let memory be too small for more copies than some, and note those that are made."""
    made, copy_into = list[ref[Tensor]](), adopt.copied_into

    def copied(like: Tensor, room: Tensor | None) -> Tensor:
        if len(made) >= copies:
            raise torch.OutOfMemoryError("out of memory")
        mine = copy_into(like, room)
        made.append(ref(mine))
        return mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopt, "copied_into", copied)
        yield made


def short(
    rank: int, world: int, device: torch.device, actions: tuple[str, ...]
) -> tuple[list[tuple[float, int, str, bool]], str]:
    """Return, after each action, the error, the functions' calls, what computes, whether copies exist; what is printed.

    Where copies do not fit, only the last rank lacks room, for the fourth one.
    """
    tiny, answers, copies = MODELS["wan"], [], list[ref[Tensor]]()
    module, whole = tiny.build().to(device), tiny.build().to(device)
    with counted() as calls, redirect_stdout(StringIO()) as printed:
        for action in actions:
            for one in (module, whole) if action != "nothing" else ():
                act(one, action.removesuffix(" again"))
            given = tiny.arguments(device)
            given |= {"attention_kwargs": {"scale": 0.4}} if action == "a call's scale" else {}
            calls.clear()
            lacks = rank == world - 1 and not SHORT[action][0]
            with room_for(3 if lacks else torch.inf) as made, StayDouble(), torch.no_grad():
                if not answers:
                    seqpar.parallelize(module, make_mesh(device, cfg=1))
                    in_double(module)
                got = flat(module(**given, return_dict=False))
                wanted = flat(whole(**copy.deepcopy(given), return_dict=False))
            copies += made
            told, exist = module.forward.sharded.texts(), any(one() is not None for one in copies)
            answers.append((error(got, wanted), len(calls), told["computation"], exist))
    seqpar.release(module)
    return answers, printed.getvalue()


@pytest.mark.parametrize(("world", "actions"), [(1, tuple(SHORT)), (2, tuple(SHORT)[:5]), (2, ("load",))])
def test_adapters_whose_copies_do_not_fit_on_one_rank_are_left_to_diffusers_own(
    ranks: Pool, world: int, actions: tuple[str, ...]
) -> None:
    for rank, (answers, printed) in enumerate(ranks.run(world, short, actions)):
        for action, (wrong, calls, computation, exist) in zip(actions, answers, strict=True):
            _, fused, says = SHORT[action]
            assert wrong < TOLERANCE, action
            assert calls == (2 if fused else 0), action
            assert (NO_ROOM in computation) is says, action
            assert exist is (action == "load again"), action
        assert printed.count(f"2 of 2 blocks are diffusers' own, because {NO_ROOM}") == (rank == 0)


def test_negative_control_adapters_that_are_left_out_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallowing(self: FusedBlocks) -> None:
        with suppress(torch.OutOfMemoryError):
            self._merge()

    monkeypatch.setattr(FusedBlocks, "_take_weights", swallowing)
    (_, (wrong, *_)), _ = short(0, 1, torch.device("cpu"), ("nothing", "load"))
    assert wrong > VISIBLE
