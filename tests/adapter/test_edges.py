# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests of the adapter's edges: numbers of tokens that mislead a rank, autocast, and what `release` leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from tests.adapter.test_cuts import raised
from tests.adapter.test_generic import TOLERANCE, body_of, called, error
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import random
from tests.support.pool import Pool


class Block(nn.Module):
    """Attention to own tokens, then to a text, by modules of one class whose names tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Attention(query_dim=20, heads=5, dim_head=4) for _ in range(2))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """Return the tokens after both."""
        x = hidden_states + self.first(hidden_states)
        return x + self.second(x, encoder_hidden_states=encoder_hidden_states)


class Reader(nn.Module):
    """A transformer with a plan in diffusers' form, which splits its own tokens and leaves the text whole."""

    PLAN = {
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(2)), nn.Linear(20, 20)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        """Return the tokens after all blocks."""
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states)
        return (self.out(hidden_states),)


def reading(rank: int, world: int, device: torch.device, texts: tuple[int, ...]) -> list[str | float]:
    """Return the errors, or messages, of calls with 9 tokens and texts of some lengths."""
    torch.manual_seed(1)
    module: Any = Reader().double().to(device).requires_grad_(False)
    found, state = [], random((2, 9, 20), 1, device)
    body = body_of(module, world, device, "kv_gather", cuts=Reader.PLAN)
    for length in texts:
        given = {"hidden_states": state, "encoder_hidden_states": random((2, length, 20), length, device)}
        truth, made = module(**given), []
        message = raised(lambda given=given, made=made: made.append(called(body, given)))
        found.append(error(made[0], truth) if made else message)
    return found


@pytest.mark.parametrize(("world", "texts"), [(2, (7, 4, 9)), (3, (5, 3, 1))])
def test_whole_text_is_read_locally_or_refused_on_every_rank(ranks: Pool, world: int, texts: tuple[int, ...]) -> None:
    """Nine tokens are 5 and 4 on two ranks, where a text of 4 looks like its own tokens to the second rank."""
    every = ranks.run(world, reading, texts)
    for right, unclear, last in every:
        assert right < TOLERANCE
        assert "got cross-attention at blocks.0.first to as many tokens as a rank has of its own" in unclear
        assert last < TOLERANCE
    assert len({found[1] for found in every}) == 1


def pictures(rank: int, world: int, device: torch.device) -> str:
    """Return the message of a FLUX whose IP-adapter's picture has as many tokens as a rank has of the image."""
    tiny = MODELS["flux"]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    arguments["joint_attention_kwargs"] = {"ip_hidden_states": [random((2, 7, 16), 20, device)]}
    for block in module.transformer_blocks:
        made = FluxIPAdapterAttnProcessor(module.inner_dim, 16).double().to(device).requires_grad_(False)
        block.attn.set_processor(made)
    body = body_of(module, world, device, "ulysses")
    return raised(lambda: called(body, arguments))


def test_a_picture_that_looks_like_split_tokens_to_one_rank_is_refused_on_every_rank(ranks: Pool) -> None:
    first, second = ranks.run(2, pictures)  # 15 tokens of the image are 8 and 7
    assert first == second
    assert "to other tokens than each rank's share of text and image" in first
