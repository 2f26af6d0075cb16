"""Tests of attention whose queries are whole on every rank and whose keys are split: LTX-2's sound reads its video."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor
from torch import Tensor

from tests.support.diffusers_tiny import MODELS, moved, truth
from tests.support.pool import Pool
from tests.transformer.test_body import VISIBLE, Outputs, body_of, called, error

TOLERANCE = 1e-12


def split(rank: int, world: int, device: torch.device, name: str, fused: bool, changed: dict[str, Any]) -> Outputs:
    """Return video and sound of a split transformer, called with some other arguments than those of its case."""
    tiny = MODELS[name]
    body = body_of(tiny.build().to(device), world, device, "ulysses", fused=fused)
    return called(body, moved({**tiny.arguments(), **changed}, device))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_sound_has_the_same_bits_on_every_rank(ranks: Pool, world: int, fused: bool) -> None:
    first, *others = ranks.run(world, split, "ltx2", fused, {})
    assert error(first, truth("ltx2", ranks.device)) < TOLERANCE
    assert all(torch.equal(mine, other) for each in others for mine, other in zip(first, each, strict=True))


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "video and sound apart": ("ltx2", {"isolate_modalities": True}),
    "attention in all blocks": ("ltx2_3", {"spatio_temporal_guidance_blocks": None}),
    "one picture without attention": ("ltx2_3", {"perturbation_mask": torch.tensor([0.0, 1.0]).double()}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_guidance_are_right(ranks: Pool, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    name, changed = KINDS[kind]
    tiny = MODELS[name]
    arguments = {**tiny.arguments(), **changed}
    wanted = tuple(x.cpu() for x in tiny.whole(None, moved(arguments, ranks.device), ranks.device))
    assert error(wanted, truth(name, ranks.device)) > VISIBLE
    for fused in (False, True):
        for outputs in ranks.run(2, split, name, fused, changed):
            assert error(outputs, wanted) < TOLERANCE
    split(0, 1, torch.device("cpu"), name, True, changed)
    assert ("some pictures are perturbed, others are not" in capfd.readouterr().out) == (
        kind == "one picture without attention"
    )


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
    """Return the outputs with a processor of a user in one of the sound's attentions to the video, or the message."""
    module: Any = MODELS["ltx2"].build().to(device)
    module.transformer_blocks[1].video_to_audio_attn.set_processor(kind())
    try:
        return called(body_of(module, world, device, "ring"), MODELS["ltx2"].arguments(device))
    except ValueError as refusal:
        return str(refusal)


def test_a_users_processor_is_right_and_its_mask_is_refused(ranks: Pool) -> None:
    for outputs in ranks.run(2, with_processor, Mine):
        assert not isinstance(outputs, str), outputs
        assert error(outputs, truth("ltx2", ranks.device)) < TOLERANCE
    for message in ranks.run(2, with_processor, Masking):
        assert "its queries are whole on every rank" in message


def with_mask_of_queries(rank: int, world: int, device: torch.device) -> Outputs | str:
    """Return the outputs where tokens of the video read different ones, or the message."""
    tiny = MODELS["ltx2"]
    arguments = tiny.arguments(device)
    mask = torch.ones(2, 45, 45, device=device).double().tril()
    try:
        body = body_of(tiny.build().to(device), world, device, "ulysses", fused=True)
        return called(body, {**arguments, "video_self_attention_mask": mask})
    except ValueError as refusal:
        return str(refusal)


def test_a_mask_that_differs_between_tokens_runs_on_one_rank_alone(ranks: Pool) -> None:
    mask = torch.ones(2, 45, 45, device=ranks.device).double().tril()
    arguments = MODELS["ltx2"].arguments(ranks.device) | {"video_self_attention_mask": mask}
    (outputs,) = ranks.run(1, with_mask_of_queries)
    wanted = tuple(x.cpu() for x in MODELS["ltx2"].whole(arguments=arguments, device=ranks.device))
    assert error(outputs, wanted) < TOLERANCE
    for message in ranks.run(2, with_mask_of_queries):
        assert "expected a row of keys per batch row" in message
