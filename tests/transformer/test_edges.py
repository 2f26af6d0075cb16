# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests what the table of families (`tests/test_families.py`) does not cross: few tokens, many lengths, cuts, adapters.

Among the models are those on which diffusers' own context parallelism (0.42.1) is wrong or fails: masks with token
counts that the ranks do not divide, LTX with a mask or with a timestep for each token, and heads that the ranks do not
divide. Most of these tests say what is refused, on every rank alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_processor import Attention, SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor
from torch import Tensor, nn

import seqpar
from seqpar.families import _prove
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._find import CUTS, cuts_of
from seqpar.families._masks import Prepared
from seqpar.families._refused import REFUSED as UNSPLIT
from seqpar.graphs.signature import form_of
from seqpar.mesh.mesh import Axis
from seqpar.transformer.forward import CallState
from seqpar.transformer.guidance import cut_rows
from seqpar.transformer.hooks import on_device
from seqpar.transformer.masks import key_rows
from tests.support.diffusers_tiny import MODELS, few, moved, truth
from tests.support.meshes import counted_calls, existing, mesh_for, random
from tests.support.pool import Pool
from tests.support.sharded import CPU, TOLERANCE, VISIBLE, Outputs, body_of, called, computed, error, raised
from tests.transformer.users_code import pictures, with_ip_adapter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi asks for fp32


def left(rank: int, world: int, device: torch.device) -> int:
    """Return how many more `CallState` exist after models were split, called and dropped without a release."""
    before = existing(CallState)
    for name in ("flux", "qwen", "sd3_dual", "wan", "hunyuan", "lumina2"):  # of one code each
        called(body_of(MODELS[name].build().to(device), world, device), MODELS[name].arguments(device))
    return existing(CallState) - before


def test_a_dropped_transformer_leaves_no_exchanges(ranks: Pool) -> None:
    """Qwen-Image's rotary embedding outlives its transformer in a cache of diffusers; our hook on it must not."""
    assert ranks.run(2, left) == [0, 0]


def changed(rank: int, world: int, device: torch.device, name: str) -> list[float]:
    """Return the errors of a module that is called whole between split calls, changed, released and split again."""
    tiny = MODELS[name]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    whole, own = tiny.whole(module, arguments), [one.processor for one in module.modules() if hasattr(one, "processor")]
    body = body_of(module, world, device)
    errors = [error(called(body, arguments), whole), error(tiny.whole(module, arguments), whole)]
    if hasattr(module, "fuse_qkv_projections"):
        module.fuse_qkv_projections()  # on some models this sets other processors
        errors.append(error(called(body, arguments), whole))
        module.unfuse_qkv_projections()
    errors.append(error(called(body, arguments), whole))
    body.release()
    again = [one.processor for one in module.modules() if hasattr(one, "processor")]
    assert all(mine is other for mine, other in zip(own, again, strict=True))
    errors.append(error(tiny.whole(module, arguments), whole))
    return [*errors, error(called(body, arguments), whole)]


@pytest.mark.parametrize("name", ["flux", "cogvideox", "qwen_masked"])
def test_the_module_runs_whole_outside_of_calls_and_after_release(ranks: Pool, name: str) -> None:
    for errors in [*ranks.run(2, changed, name), changed(0, 1, CPU, name)]:
        assert max(errors) < TOLERANCE


def lengths(rank: int, world: int, device: torch.device) -> list[float]:
    """Return the errors of calls with more lengths of texts than exchanges are kept for, and of the first one again."""
    tiny = MODELS["qwen"]
    body, errors, keys = body_of(tiny.build().to(device), world, device), [], []
    for length in [*range(2, 21), 2]:
        arguments = {**tiny.arguments(device), "encoder_hidden_states": random((1, length, 24), length, device)}
        got = called(body, arguments)
        errors += [error(got, tiny.whole(None, arguments, device))] if length in (2, 20) else []
        keys.append(body.sharded.key())
    assert keys[0] != keys[-1]
    return errors


def test_texts_of_ever_new_lengths_do_not_fill_the_memory(ranks: Pool) -> None:
    for errors in ranks.run(2, lengths):
        assert max(errors) < TOLERANCE


def collectives(rank: int, world: int, device: torch.device, name: str) -> dict[str, int]:
    tiny = MODELS[name]
    body = body_of(tiny.build().to(device), world, device)
    called(body, tiny.arguments(device))
    return counted_calls(lambda: computed(body, tiny.arguments(device)))


@pytest.mark.parametrize(
    ("name", "attentions"), [("flux", 4), ("qwen_masked", 2), ("wan", 2), ("ltx", 2), ("pixart", 2)]
)
def test_an_attention_takes_two_collectives_and_cross_attention_none(ranks: Pool, name: str, attentions: int) -> None:
    for counts in ranks.run(3, collectives, name):
        assert sum(counts.values()) == 2 * attentions + 1, counts  # and one gather of the output


def test_weights_of_layers_are_whole_where_there_are_as_many_as_rows() -> None:
    """Each half of a batch of three needs all three weights of VACE's blocks."""
    whole = replace(MODELS["wan_vace"], batch=3).arguments()
    assert len(whole["control_hidden_states_scale"]) == len(whole["hidden_states"])
    for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
        form, _ = cut_rows(form_of(dict(whole)), [Axis("cfg", rank, 2)])
        assert torch.equal(form.tensors["control_hidden_states_scale"], whole["control_hidden_states_scale"])
        assert torch.equal(form.tensors["control_hidden_states"], whole["control_hidden_states"][rows])


def test_timesteps_of_a_packed_sequence_are_whole_where_there_are_as_many_as_rows() -> None:
    """Each row of MiniMax-H3's batch has tokens of both timesteps."""
    whole = MODELS["minimax_h3"].arguments()
    call = Prepared(dict(whole), 1, True, lambda *_: 0, {})
    assert CUTS["MiniMaxH3Transformer3DModel"].prepare is not None
    CUTS["MiniMaxH3Transformer3DModel"].prepare(call)
    form, _ = cut_rows(form_of(call.arguments), [Axis("data", 1, 2)])
    assert len(whole["timestep"]) == len(whole["hidden_states"]) == 2
    assert torch.equal(form.tensors["timestep"][:2], whole["timestep"])
    assert torch.equal(form.tensors["hidden_states"], whole["hidden_states"][1:])


def under_autocast(rank: int, world: int, device: torch.device) -> list[float]:
    """Return the largest differences to diffusers' result under autocast, and to that without it."""
    module = MODELS["flux"].build().float().to(device)
    given = {name: x.float() for name, x in MODELS["flux"].arguments(device).items()}
    with torch.no_grad():
        plain = module(**given).sample
        with torch.autocast(device.type, torch.bfloat16):
            cast = module(**given).sample
    seqpar.parallelize(module, mesh_for("ulysses", world, device))
    with torch.autocast(device.type, torch.bfloat16):
        got = module(**given).sample
    assert got.dtype == cast.dtype
    again = module(**given).sample  # without autocast the fused blocks compute
    return [(x.float() - y.float()).abs().max().item() for x, y in ((got, cast), (again, plain), (cast, plain))]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of diffusers' own norms
@pytest.mark.parametrize("world", [1, 2])
def test_fp32_weights_under_autocast_compute_what_diffusers_does(ranks: Pool, world: int) -> None:
    for cast, plain, rounded in ranks.run(world, under_autocast):
        assert cast < 0.5 * rounded
        assert plain < 1e-3 * rounded


# Attention to whole keys ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to own tokens, then to a text, by modules of one class whose names tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Attention(query_dim=20, heads=5, dim_head=4) for _ in range(2))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.first(hidden_states)
        return x + self.second(x, encoder_hidden_states=encoder_hidden_states)


class Reader(nn.Module):
    """A transformer for which `PLAN`, in diffusers' form, splits its own tokens and leaves the text whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(2)), nn.Linear(20, 20)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states)
        return (self.out(hidden_states),)


PLAN = {
    "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
    "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


def reading(rank: int, world: int, device: torch.device, texts: tuple[int, ...]) -> list[str | float]:
    torch.manual_seed(1)
    module: Any = Reader().double().to(device).requires_grad_(False)
    answers, state = [], random((2, 9, 20), 1, device)
    body = body_of(module, world, device, "kv_gather", cuts=PLAN)
    for length in texts:
        given = {"hidden_states": state, "encoder_hidden_states": random((2, length, 20), length, device)}
        outputs: list[Outputs] = []
        message = raised(lambda given=given, outputs=outputs: outputs.append(called(body, given)))
        answers.append(error(outputs[0], module(**given)) if outputs else message)
    return answers


@pytest.mark.parametrize(("world", "texts"), [(2, (7, 4, 9)), (3, (5, 3, 1))])
def test_whole_text_is_read_locally_or_refused_on_every_rank(ranks: Pool, world: int, texts: tuple[int, ...]) -> None:
    """Nine tokens are 5 and 4 on two ranks, where a text of 4 looks like its own tokens to the second rank."""
    answers = ranks.run(world, reading, texts)
    for right, unclear, last in answers:
        assert max(right, last) < TOLERANCE
        assert "got cross-attention at blocks.*.first to as many tokens as a rank's share" in unclear
    assert len({unclear for _, unclear, _ in answers}) == 1


def like_split_tokens(rank: int, world: int, device: torch.device) -> str:
    module = MODELS["flux"].build().to(device)
    with_ip_adapter(module)
    body = body_of(module, world, device)
    return raised(lambda: called(body, {**MODELS["flux"].arguments(device), **pictures(7)(device)}))


def sd3_pictures(rank: int, world: int, device: torch.device) -> str:
    """Return the message of an SD3 whose IP-adapter joins a rank's image keys with those of the picture."""
    module = MODELS["sd3"].build().to(device)
    width, head_dim = module.inner_dim, module.config.attention_head_dim
    for block in module.transformer_blocks:
        processor = SD3IPAdapterJointAttnProcessor2_0(width, 16, head_dim, 16).double().to(device)
        block.attn.set_processor(processor.requires_grad_(False))
    before = list(module.attn_processors.values())
    message = raised(lambda: body_of(module, world, device))
    assert all(x is y for x, y in zip(module.attn_processors.values(), before, strict=True))
    return message


def test_adapters_that_read_keys_of_split_tokens_are_refused_on_every_rank(ranks: Pool) -> None:
    assert ranks.run(1, sd3_pictures) == ["nothing was raised"]
    (message,) = set(ranks.run(2, sd3_pictures))
    assert "SD3's IP-adapter is not supported on several ranks" in message
    (message,) = set(ranks.run(2, like_split_tokens))  # 15 tokens of the image are 8 and 7
    assert "to other tokens than each rank's share of text and image" in message


# LTX-2's sound is whole on every rank and reads the video


def heard(rank: int, world: int, device: torch.device, name: str, fused: bool, changed: dict[str, Any]) -> Outputs:
    body = body_of(MODELS[name].build().to(device), world, device, fused=fused)
    return called(body, moved({**MODELS[name].arguments(), **changed}, device))


SOUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("ltx2", {}),
    "video and sound apart": ("ltx2", {"isolate_modalities": True}),
    "attention in all blocks": ("ltx2_3", {"spatio_temporal_guidance_blocks": None}),
    "one picture without attention": ("ltx2_3", {"perturbation_mask": torch.tensor([0.0, 1.0]).double()}),
}


@pytest.mark.parametrize("kind", SOUNDS)
def test_a_sound_is_right_and_has_the_same_bits_on_every_rank(
    ranks: Pool, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    name, other = SOUNDS[kind]
    wanted = MODELS[name].whole(None, moved({**MODELS[name].arguments(), **other}, ranks.device), ranks.device)
    wanted = tuple(x.cpu() for x in wanted)
    assert not other or error(wanted, truth(name, ranks.device)) > VISIBLE
    for world, fused in ((2, False), (3, True)):
        first, *others = ranks.run(world, heard, name, fused, other)
        assert error(first, wanted) < TOLERANCE
        assert all(torch.equal(x, y) for each in others for x, y in zip(first, each, strict=True))
    heard(0, 1, CPU, name, True, other)
    partly = kind == "one picture without attention"
    assert ("some pictures are perturbed, others are not" in capfd.readouterr().out) == partly


class Mine(LTX2AudioVideoAttnProcessor):
    """A user's processor, which may mask the keys."""

    masks = False

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        mask = encoder_hidden_states.new_zeros(len(hidden_states), 1, encoder_hidden_states.shape[1])
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, mask if self.masks else None, query_rotary_emb, key_rotary_emb
        )


class Masking(Mine):
    masks = True


def with_processor(rank: int, world: int, device: torch.device, kind: type[Mine]) -> Outputs | str:
    module: Any = MODELS["ltx2"].build().to(device)
    module.transformer_blocks[1].video_to_audio_attn.set_processor(kind())
    outputs: list[Outputs] = []
    body = body_of(module, world, device, "ring")
    message = raised(lambda: outputs.append(called(body, MODELS["ltx2"].arguments(device))))
    return outputs[0] if outputs else message


def test_a_users_processor_on_a_sound_is_right_and_its_mask_is_refused(ranks: Pool) -> None:
    for outputs in ranks.run(2, with_processor, Mine):
        assert not isinstance(outputs, str), outputs
        assert error(outputs, truth("ltx2", ranks.device)) < TOLERANCE
    for message in ranks.run(2, with_processor, Masking):
        assert "its queries are whole on every rank" in message


# Cuts ----------------------------------------------------------------------------------------------------------


def with_plan(rank: int, world: int, device: torch.device, name: str, cuts: Any) -> str | Outputs:
    tiny = MODELS[name]
    try:
        body = body_of(tiny.build().to(device), world, device, "kv_gather", cuts=cuts)
        return called(body, tiny.arguments(device))
    except ValueError as refusal:
        return str(refusal)


OUT = {"proj_out": Boundary(gathers={0: GatherTokens("image")})}
JOINS = {"transformer_blocks.*.attn": Joint(("image", "text"))}
WRONG_PLANS: dict[str, tuple[str, Any, str]] = {
    "no cut of the text": (
        "sd3",
        Cuts({"pos_embed": Boundary(outputs={0: CutTokens("image")}), **OUT}, JOINS),
        "to other tokens than each rank's share of image and text",
    ),
    "a gather without a cut": (
        "sd3",
        Cuts({"context_embedder": Boundary(outputs={0: CutTokens("text")}), **OUT}, {}, local=tuple(JOINS)),
        "before any cut of it",
    ),
    "no order of streams": ("qwen_masked", None, "their order"),
    "a mask": ("ltx", None, "with cuts that split text"),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_a_plan_that_says_too_little_is_refused_on_every_rank(ranks: Pool, wrong: str) -> None:
    name, cuts, words = WRONG_PLANS[wrong]
    for message in ranks.run(2, with_plan, name, cuts or MODELS[name].build()._cp_plan):
        assert words in message


SD3_IN_DIFFUSERS_FORM = {
    "transformer_blocks.0": {
        "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
        "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
    },
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


@pytest.mark.parametrize(
    ("world", "name"),
    [(2, "flux"), (3, "flux2"), (2, "qwen"), (3, "wan"), (2, "wan2.2"), (3, "sd3"), (2, "minimax_h3")],
)
def test_a_plan_in_diffusers_form_is_taken(ranks: Pool, world: int, name: str) -> None:
    cuts = SD3_IN_DIFFUSERS_FORM if name == "sd3" else MODELS[name].build()._cp_plan
    for got in ranks.run(world, with_plan, name, cuts):
        assert not isinstance(got, str), got
        assert error(got, truth(name, ranks.device)) < TOLERANCE


def test_a_class_that_mixes_tokens_in_another_way_is_refused_by_name() -> None:
    message = raised(lambda: cuts_of(type("SanaTransformer2DModel", (nn.Module,), {})()))
    assert message.startswith("got SanaTransformer2DModel, whose tokens are not split: it mixes tokens by linear")


def test_a_transformer_without_a_plan_is_refused_with_the_way_to_write_one() -> None:
    class Unknown(nn.Module):
        """A transformer that nobody has written a plan for."""

    message = raised(lambda: cuts_of(Unknown()))
    assert message.startswith("got Unknown, which has no known cuts")
    example = message[message.index("    from seqpar") : message.index("Cut every tensor")]
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in example.splitlines()), names)
    assert isinstance(names["cuts"], Cuts)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (Cuts({"blocks.0": Boundary()}, {}), "which SD3Transformer2DModel does not have"),
        (Cuts({}, {"blocks.*.attn": Joint()}), "which SD3Transformer2DModel does not have"),
        (Cuts({"pos_embed": Boundary(inputs={"tokens": CutTokens("image")})}, {}), "one of the inputs of PatchEmbed"),
        (Cuts({}, {}, masks={"mask": "text"}), "got cuts of the input 'mask' of the transformer"),
        ({"proj_out": 3}, "expected ContextParallelOutput"),
        ({"pos_embed": {0: 3}}, "expected a ContextParallelInput"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(cuts: Any, words: str) -> None:
    assert words in raised(lambda: cuts_of(MODELS["sd3"].build(), cuts))


def test_a_subclass_has_the_plan_of_its_class() -> None:
    module = MODELS["flux"].build()
    module.__class__ = type("Mine", (type(module),), {})
    assert cuts_of(module) is cuts_of(MODELS["flux"].build())


@pytest.mark.parametrize("name", ["hunyuan15", "qwen_edit"])
def test_a_forward_that_is_not_diffusers_own_computes_itself(name: str) -> None:
    """Its text has the order of the masks, too; it may read values on the host, or copy them from it."""
    tiny, own = MODELS[name], MODELS[name].build()
    before = type(own).forward

    @wraps(before)
    def forward(self: Any, **arguments: Any) -> Outputs:
        return tuple(2 * x for x in before(self, **arguments))

    own.__class__ = type("Mine", (type(own),), {"__module__": "mine", "forward": forward})
    body = body_of(own)
    assert error(called(body, tiny.arguments()), tuple(2 * x for x in truth(name, "cpu"))) < TOLERANCE
    assert "the forward of Mine may read values on the host" in (body.sharded.why_eager() or "")
    assert body_of(tiny.build()).sharded.why_eager() is None


def test_an_edit_model_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA graph could: it would read memory of the host again that is another's by then."""
    tiny, copied, make = MODELS["qwen_edit"], list[object](), torch.tensor
    arguments = {**tiny.arguments(), "encoder_hidden_states_mask": None}
    body = body_of(tiny.build())
    called(body, arguments)
    monkeypatch.setattr(torch, "tensor", lambda values, **how: (copied.append(values), make(values, **how))[1])
    called(body, arguments)
    assert not copied
    tiny.whole(arguments=arguments)
    assert copied  # a negative control: diffusers' own forward does


# What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reason"), [("hunyuan_replaced", "image_condition_type token_replace")])
def test_tokens_that_cannot_be_split_run_on_one_rank_alone(ranks: Pool, name: str, reason: str) -> None:
    (got,) = ranks.run(1, with_plan, name, None)
    assert error(got, truth(name, ranks.device)) < TOLERANCE
    for message in ranks.run(2, with_plan, name, None):
        assert "cannot be split over 2 ranks: " in message
        assert reason in message


def first_two(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, **{name: given[name][:, :2] for name in ("hidden_states", "img_ids")}}


def few_frames(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "face_pixel_values": given["face_pixel_values"][:, :, :9]}


# model, whether by diffusers' plan, its arguments -> the message
REFUSED: list[tuple[str, bool, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    ("flux2", False, lambda x: {**x, "kv_cache_mode": "extract"}, "kv_cache_mode of Flux2Transformer2DModel is not"),
    ("flux2", False, lambda x: {**x, "img_ids": x["img_ids"][:, :-1]}, "with 14 tokens of image, expected 15"),
    ("flux2", False, first_two, "got 2 tokens of image for 3 ranks, expected at least one per rank"),
    ("flux3", False, lambda x: few(x, 1), "a text of one token cannot be split; pad it or use cfg=/data="),
    ("hunyuan", False, few, "got 2 tokens of text for 3 ranks"),
    ("flux2", True, few, "got 2 tokens of text for 3 ranks"),
    ("ltx2", False, lambda x: {**x, **by_token(x)}, "expected a row of keys per batch row"),
    ("wananimate", False, few_frames, "got 4 rows for groups of 75 tokens of image, expected groups of one size"),
]


def by_token(given: dict[str, Any]) -> dict[str, Any]:
    return {"video_self_attention_mask": given["hidden_states"].new_ones(2, 45, 45).tril()}


def test_a_mask_that_differs_between_tokens_runs_on_one_rank() -> None:
    given = MODELS["ltx2"].arguments()
    given |= by_token(given)
    body = body_of(MODELS["ltx2"].build(), fused=True)
    assert error(called(body, given), MODELS["ltx2"].whole(arguments=given)) < TOLERANCE


def refusals(rank: int, world: int, device: torch.device) -> list[str]:
    messages = []
    for name, by_plan, change, _ in REFUSED:
        module = MODELS[name].build().to(device)
        body = body_of(module, world, device, cuts=module._cp_plan if by_plan else None, fused=name == "ltx2")
        given = change(MODELS[name].arguments(device))
        messages.append(raised(lambda body=body, given=given: computed(body, given)))
    return messages


def test_calls_that_cannot_be_split_are_refused_on_every_rank(ranks: Pool) -> None:
    for messages in ranks.run(3, refusals):
        for message, (*_, words) in zip(messages, REFUSED, strict=True):
            assert words in message


def test_rows_of_several_streams_must_be_those_of_all_their_tokens() -> None:
    body, given = body_of(MODELS["krea2"].build()), MODELS["krea2"].arguments()
    message = raised(lambda: computed(body, {**given, "position_ids": given["position_ids"][1:]}))
    assert "got a tensor of shape (21, 3) for all tokens of text and image, of which 7, 15 were cut" in message


def test_a_number_of_the_host_is_made_on_the_device() -> None:
    """A CUDA graph could not copy it there; different numbers are left as they are."""
    ranks: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("meta")))
    zeros, several = torch.tensor([0, 0]), torch.tensor([0, 1])
    on_meta = on_device(ranks, zeros)
    assert (on_meta.device.type, on_meta.shape, on_meta.dtype) == ("meta", zeros.shape, zeros.dtype)
    assert on_device(ranks, several) is several
    assert cuts_of(MODELS["chroma"].build()).places["time_text_embed.guidance_proj"].numbers == ("timesteps",)


def test_masks_that_cannot_be_split_are_refused() -> None:
    for shape in ((2, 5, 5), (2, 3, 1, 5), (5, 5)):
        assert "expected a row of keys" in raised(lambda shape=shape: key_rows(torch.ones(shape), 2))


def test_the_page_names_the_transformers_that_run_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    block = text.partition("<!-- transformers -->")[2].partition("<!-- end of transformers -->")[0]
    assert sorted(re.findall(r"`(\w+)`", block)) == sorted(CUTS)
    assert f"these {len(CUTS)} run" in text
    if diffusers.__version__.startswith("0.42."):
        every = _prove.transformers()
        assert f"Of the {len(every)} classes" in text
        readme = (Path(__file__).parents[2] / "README.md").read_text()
        assert f"Of diffusers' {len(every)} transformer classes {sum(map(_prove.runs, every))} run" in readme
        assert {kind for kind in every if _prove.runs(kind)} - CUTS.keys() == {"HeliosTransformer3DModel"}
        assert UNSPLIT.keys() <= set(every) - CUTS.keys()
