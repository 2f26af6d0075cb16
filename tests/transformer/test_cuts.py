"""Tests of plans (`Cuts`): ours and diffusers' form, and the errors for what cannot be split, on every rank alike."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._find import CUTS, cuts_of
from seqpar.transformer.hooks import on_device
from seqpar.transformer.masks import key_rows
from tests.support.diffusers_tiny import MODELS, few, truth
from tests.support.pool import Pool
from tests.transformer.test_body import TOLERANCE, Outputs, body_of, called, computed, error


def raised(work: Callable[[], object]) -> str:
    """Return the message of the ValueError that `work` raises."""
    try:
        work()
    except ValueError as found:
        return str(found)
    return "nothing was raised"


def with_plan(rank: int, world: int, device: torch.device, name: str, cuts: Any) -> str | Outputs:
    """Return the outputs of a transformer that is split by a caller's plan, or the message of its ValueError."""
    tiny = MODELS[name]
    try:
        body = body_of(tiny.build().to(device), world, device, "kv_gather", cuts=cuts)
        return called(body, tiny.arguments(device))
    except ValueError as found:
        return str(found)


FORGOTTEN = {
    "text": (
        {"pos_embed": Boundary(outputs={0: CutTokens("image")})},
        "to other tokens than each rank's share of image and text",
    ),
    "gather": ({"context_embedder": Boundary(outputs={0: CutTokens("text")})}, "before any cut of it"),
}


@pytest.mark.parametrize("forgotten", ["text", "gather"])
def test_a_plan_without_a_cut_is_refused_on_every_rank(ranks: Pool, forgotten: str) -> None:
    places, told = FORGOTTEN[forgotten]
    out = Boundary(gathers={0: GatherTokens("image")})
    joint = {"transformer_blocks.*.attn": Joint(("image", "text"))} if forgotten == "text" else {}
    cuts = Cuts({**places, "proj_out": out}, joint, local=("transformer_blocks.*.attn",))
    for message in ranks.run(2, with_plan, "sd3", cuts):
        assert told in message


# Plans ---------------------------------------------------------------------------------------------------------

SD3_IN_DIFFUSERS_FORM = {
    "transformer_blocks.0": {
        "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
        "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
    },
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen", "wan", "wan2.2", "sd3"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_in_diffusers_form_is_taken(ranks: Pool, world: int, name: str) -> None:
    cuts = SD3_IN_DIFFUSERS_FORM if name == "sd3" else MODELS[name].build()._cp_plan
    for got in ranks.run(world, with_plan, name, cuts):
        assert not isinstance(got, str), got
        assert error(got, truth(name, ranks.device)) < TOLERANCE


@pytest.mark.parametrize(("name", "told"), [("qwen_masked", "their order"), ("ltx", "with cuts that split text")])
def test_diffusers_form_is_refused_where_it_says_too_little(ranks: Pool, name: str, told: str) -> None:
    for message in ranks.run(2, with_plan, name, MODELS[name].build()._cp_plan):
        assert told in message


class Unknown(nn.Module):
    """A transformer that nobody has written a plan for."""


def test_a_transformer_without_a_plan_is_refused_with_the_way_to_write_one() -> None:
    message = raised(lambda: cuts_of(Unknown()))
    assert message.startswith("got Unknown, which has no known cuts")
    example = message[message.index("    from seqpar") : message.index("Cut every tensor")]
    made: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in example.splitlines()), made)
    assert isinstance(made["cuts"], Cuts)


@pytest.mark.parametrize(
    ("cuts", "told"),
    [
        (Cuts({"blocks.0": Boundary()}, {}), "which SD3Transformer2DModel does not have"),
        (Cuts({}, {"blocks.*.attn": Joint()}), "which SD3Transformer2DModel does not have"),
        (
            Cuts({"pos_embed": Boundary(inputs={"tokens": CutTokens("image")})}, {}),
            "expected one of the inputs of PatchEmbed",
        ),
        (Cuts({}, {}, masks={"mask": "text"}), "got cuts of the input 'mask' of the transformer"),
        ({"proj_out": 3}, "expected ContextParallelOutput"),
        ({"pos_embed": {0: 3}}, "expected a ContextParallelInput"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(cuts: Any, told: str) -> None:
    assert told in raised(lambda: cuts_of(MODELS["sd3"].build(), cuts))


def test_a_subclass_has_the_plan_of_its_class() -> None:
    module = MODELS["flux"].build()
    module.__class__ = type("Mine", (type(module),), {})
    assert cuts_of(module) is cuts_of(MODELS["flux"].build())


@pytest.mark.parametrize(
    ("name", "told"), [("hunyuan15", "by their values"), ("qwen_edit", "copy which tokens are of reference images")]
)
def test_a_forward_that_is_not_diffusers_own_computes_itself(name: str, told: str) -> None:
    """Its text has the order of the masks, too; it may read values on the host, or copy them from it."""
    tiny, own = MODELS[name], MODELS[name].build()
    plain, theirs = body_of(tiny.build(), 1, torch.device("cpu"), "ulysses"), type(own).forward

    @wraps(theirs)
    def forward(self: Any, **arguments: Any) -> Outputs:
        return tuple(2 * x for x in theirs(self, **arguments))

    own.__class__ = type("Mine", (type(own),), {"__module__": "mine", "forward": forward})
    body = body_of(own, 1, torch.device("cpu"), "ulysses")
    assert error(called(body, tiny.arguments()), tuple(2 * x for x in truth(name, "cpu"))) < TOLERANCE
    assert told in (body.why_eager() or "")
    assert plain.why_eager() is None


def test_an_edit_model_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA graph could: it would read memory of the host again that is another's by then."""
    tiny, copied, make = MODELS["qwen_edit"], list[object](), torch.tensor
    arguments = {**tiny.arguments(), "encoder_hidden_states_mask": None}
    body = body_of(tiny.build(), 1, torch.device("cpu"), "ulysses")

    def noted(values: object, **how: Any) -> torch.Tensor:
        copied.append(values)
        return make(values, **how)

    called(body, arguments)
    monkeypatch.setattr(torch, "tensor", noted)
    called(body, arguments)
    assert not copied
    tiny.whole(arguments=arguments)
    assert copied  # a negative control: diffusers' own forward does


# What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hunyuan_replaced", "image_condition_type token_replace"),
        ("qwen21", "its text attends to earlier tokens alone"),
    ],
)
def test_tokens_that_cannot_be_split_run_on_one_rank_alone(ranks: Pool, name: str, told: str) -> None:
    (got,) = ranks.run(1, with_plan, name, None)
    assert error(got, truth(name, ranks.device)) < TOLERANCE
    for message in ranks.run(2, with_plan, name, None):
        assert "cannot be split over 2 ranks: " in message
        assert told in message


def refusals(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the messages of calls that a split transformer cannot compute."""
    tiny, cases = MODELS["flux2"], []
    module = tiny.build().to(device)
    body = body_of(module, world, device, "ulysses")
    arguments = tiny.arguments(device)
    cases.append(raised(lambda: computed(body, {**arguments, "kv_cache_mode": "extract"})))
    cases.append(raised(lambda: computed(body, {**arguments, "img_ids": arguments["img_ids"][:, :-1]})))
    image = {name: arguments[name][:, :2] for name in ("hidden_states", "img_ids")}
    cases.append(raised(lambda: computed(body, {**arguments, **image})))
    three = body_of(MODELS["flux3"].build().to(device), world, device, "ulysses")
    cases.append(raised(lambda: computed(three, few(MODELS["flux3"].arguments(device), 1))))
    for name, cuts in (("hunyuan", None), ("flux2", module._cp_plan)):
        other, text = MODELS[name].build().to(device), few(MODELS[name].arguments(device))
        each = body_of(other, world, device, "ring", cuts=cuts)
        cases.append(raised(lambda each=each, text=text: computed(each, text)))
    module.set_attention_backend("native")
    cases.append(raised(lambda: computed(body, arguments)))
    return cases


def test_calls_that_cannot_be_split_are_refused_on_every_rank(ranks: Pool) -> None:
    for cached, uneven, image, one, hunyuan, plan, backend in ranks.run(3, refusals):
        assert cached.startswith("kv_cache_mode of Flux2Transformer2DModel is not supported on several ranks")
        assert "with 14 tokens of image, expected 15" in uneven
        assert "got 2 tokens of image for 3 ranks, expected at least one per rank" in image
        assert one == "a text of one token cannot be split; pad it or use cfg=/data="
        for message in (hunyuan, plan):
            assert "got 2 tokens of text for 3 ranks" in message
        assert backend.startswith("Attention backend")


def test_rows_of_several_streams_must_be_those_of_all_their_tokens() -> None:
    tiny = MODELS["krea2"]
    body, given = body_of(tiny.build(), 1, torch.device("cpu"), "ulysses"), tiny.arguments()
    message = raised(lambda: computed(body, {**given, "position_ids": given["position_ids"][1:]}))
    assert "got a tensor of shape (21, 3) for all tokens of text and image, of which 7, 15 were cut" in message


def test_a_number_of_the_host_is_made_on_the_device() -> None:
    """A CUDA graph could not copy it there; different numbers are left as they are."""
    ranks: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("meta")))
    zeros, several = torch.tensor([0, 0]), torch.tensor([0, 1])
    made = on_device(ranks, zeros)
    assert (made.device.type, made.shape, made.dtype) == ("meta", zeros.shape, zeros.dtype)
    assert on_device(ranks, several) is several
    assert cuts_of(MODELS["chroma"].build()).places["time_text_embed.guidance_proj"].numbers == ("timesteps",)


def test_masks_that_cannot_be_split_are_refused() -> None:
    for shape in ((2, 5, 5), (2, 3, 1, 5), (5, 5)):
        assert "expected a row of keys" in raised(lambda shape=shape: key_rows(torch.ones(shape), 2))


def test_every_model_of_the_table_is_tested() -> None:
    assert set(CUTS) <= {tiny.kind for tiny in MODELS.values()}


def test_the_page_names_the_transformers_that_run_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adapter.md").read_text()
    block = text.partition("<!-- transformers -->")[2].partition("<!-- end of transformers -->")[0]
    assert sorted(re.findall(r"`(\w+)`", block)) == sorted(CUTS)
    assert f"these {len(CUTS)} run" in text
    if diffusers.__version__.startswith("0.42."):
        assert f"Of the {len(every_transformer())} classes" in text


def every_transformer() -> set[str]:
    """Return the names of the classes of models that diffusers has in its folder of transformers."""
    folder = diffusers.models.transformers
    files = [importlib.import_module(f"{folder.__name__}.{one.name}") for one in pkgutil.iter_modules(folder.__path__)]
    own = [kind for file in files for kind in vars(file).values() if getattr(kind, "__module__", "") == file.__name__]
    kinds = [kind for kind in own if isinstance(kind, type) and issubclass(kind, ModelMixin)]
    return {kind.__name__ for kind in kinds if hasattr(diffusers, kind.__name__)}
