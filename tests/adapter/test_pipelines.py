"""Tests that real diffusers pipelines make diffusers' pictures after `parallelize`, whatever is asked of them.

The truth is the unchanged pipeline in one process; both sides keep fp64 where diffusers rounds to fp32. In every test
other ranks are given other seeds: all ranks must end with rank 0's picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import seqpar
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool

TOLERANCE = 1e-10
VISIBLE = 1e-4
SIZE = {"height": 20, "width": 12}  # 15 tokens for FLUX


@dataclass(frozen=True)
class Case:
    """A pipeline and the arguments of its call; `seeds` has one seed, or one for each picture."""

    pipe: Callable[[], Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1,)
    prompt: str | list[str] | None = "a red cat on the sea"

    def pictures(self, pipe: Any, rank: int = 0) -> Tensor:
        """Return the pictures of a call; ranks other than 0 ask with other seeds."""
        generator = pipelines.seeded(*(seed + 100 * rank for seed in self.seeds))
        common = {"num_inference_steps": 3, "output_type": "pt", "generator": generator, **SIZE}
        prompt = {} if self.prompt is None else {"prompt": self.prompt}
        with StayDouble():
            result = pipe(**prompt, **{**common, **self.arguments})
        pictures = result[0] if isinstance(result, tuple) else result[next(iter(result))]
        return torch.as_tensor(pictures)


NEGATIVE = {"negative_prompt": "blurry", "true_cfg_scale": 2.5}
SHORT = {"max_sequence_length": 16}
VIDEO = {"height": 48, "width": 80, "num_frames": 5, **SHORT}
PIXART = {"height": 24, "width": 16, "use_resolution_binning": False, "clean_caption": False, **SHORT}
EMBEDDED = {
    "prompt_embeds": random((1, 7, pipelines.WIDTH), 1),
    "prompt_embeds_mask": torch.ones(1, 7, dtype=torch.int64),
    "negative_prompt_embeds": random((1, 5, pipelines.WIDTH), 2),
    "negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.int64),
}
CASES = {
    "flux": Case(pipelines.flux, SHORT),
    "flux, true guidance": Case(pipelines.flux, {**NEGATIVE, **SHORT}),
    "sd3": Case(pipelines.sd3, SHORT),
    "pixart": Case(pipelines.pixart, PIXART),
    "wan": Case(pipelines.wan, VIDEO),
    "wan, two experts": Case(lambda: pipelines.wan(2), VIDEO),
    "qwen-image": Case(pipelines.qwen_image, {**EMBEDDED, "true_cfg_scale": 3.0}, prompt=None),
}


def sharded(rank: int, world: int, device: torch.device, name: str, cfg: int) -> Tensor:
    """Return this rank's pictures of the second of two calls, after `parallelize`."""
    pipe = CASES[name].pipe()
    seqpar.parallelize(pipe, make_mesh(device, cfg=cfg))
    CASES[name].pictures(pipe, rank)
    return CASES[name].pictures(pipe, rank)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world", "cfg"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_a_pipeline_makes_diffusers_picture(ranks: Pool, world: int, cfg: int, name: str) -> None:
    truth = CASES[name].pictures(CASES[name].pipe())
    for pictures in ranks.run(world, sharded, name, cfg):
        assert (pictures - truth).abs().max() < TOLERANCE
