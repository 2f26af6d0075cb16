# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests what diffusers' guiders skip: blocks, attention, its scores, or MLPs. Each is right on every number of ranks.

Skipped scores mean that attention returns its values, which diffusers does by replacing torch's function.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip

from tests.support.diffusers_tiny import MODELS
from tests.support.pool import Pool
from tests.transformer.test_body import TOLERANCE, VISIBLE, body_of, called, error

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for fp32

# LayerSkipConfig's (skip_attention, skip_attention_scores, skip_ff)
SCORES, ATTENTION, MLP, BLOCK = (False, True, False), (True, False, False), (False, False, True), (True, False, True)
NAMED = {"lumina2": "layers", "z_image": "layers"}  # the blocks that diffusers does not find by itself
# what diffusers 0.42.1 itself can skip, of the tiny models
# in the first or the last block in turn, on ranks that share the tokens
CASES = [
    *((2 + index % 2, "pixart", what, index % 2) for index, what in enumerate((SCORES, ATTENTION, MLP))),
    *((2, name, SCORES, index % 2) for index, name in enumerate(("z_image", "qwen_masked"))),
    *((2, name, BLOCK, index % 2) for index, name in enumerate(("cogvideox", "wan", "ltx", "hunyuan", "mochi"))),
    (1, "z_image", SCORES, 1),
    (1, "hunyuan", BLOCK, 1),
]


def skip(module: Any, name: str, what: tuple[bool, bool, bool], index: int) -> None:
    """Skip something in one block."""
    attention, scores, mlp = what
    config = LayerSkipConfig(
        [index], NAMED.get(name, "auto"), skip_attention=attention, skip_attention_scores=scores, skip_ff=mlp
    )
    apply_layer_skip(module, config)


def skipped(
    rank: int, world: int, device: torch.device, name: str, what: tuple[bool, bool, bool], index: int
) -> list[float]:
    """Return the errors of calls that skip something in a block, hooked after and before the module is split.

    Between them, and at the end, the hooks are removed, as guiders do in each step. The last number is how much
    skipping matters.
    """
    tiny = MODELS[name]
    arguments = tiny.arguments(device)
    module, other = tiny.build().to(device), tiny.build().to(device)
    whole = tiny.whole(module, arguments)
    skip(other, name, what, index)
    changed = tiny.whole(other, arguments)
    body = body_of(module, world, device, "ulysses")
    called(body, arguments)
    skip(module, name, what, index)
    errors = [error(called(body, arguments), changed)]
    HookRegistry.check_if_exists_or_initialize(module).remove_hook("layer_skip_hook")
    errors.append(error(called(body, arguments), whole))
    errors.append(error(called(body_of(other, world, device, "ulysses"), arguments), changed))
    HookRegistry.check_if_exists_or_initialize(other).remove_hook("layer_skip_hook")
    errors.append(error(called(body_of(other, world, device, "ulysses"), arguments), whole))
    return [*errors, error(changed, whole)]


@pytest.mark.parametrize(("world", "name", "what", "index"), CASES, ids=str)
def test_what_a_guider_skips_is_right(
    ranks: Pool, world: int, name: str, what: tuple[bool, bool, bool], index: int
) -> None:
    for *errors, matters in ranks.run(world, skipped, name, what, index):
        assert max(errors) < TOLERANCE
        assert matters > VISIBLE
