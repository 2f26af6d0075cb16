"""Tests that several modules of one path gather tokens of their own, as the blocks of a ControlNet do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.controlnets.controlnet_qwenimage import QwenImageControlNetModel

from seqpar.families._cuts import IMAGE, OUT, Boundary
from seqpar.families._find import CUTS
from tests.support.diffusers_tiny import MODELS, QWEN, Inputs
from tests.support.foreign import StayDouble
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, Outputs, body_of, error


def controlnet(device: torch.device) -> tuple[Any, Inputs]:
    """Return a tiny ControlNet with two blocks, whose residuals are its results, and its arguments for one image."""
    made: Any = QwenImageControlNetModel
    module = made(**{**QWEN, "num_layers": 2}).double().eval().requires_grad_(False)
    for seed, weight in enumerate(module.parameters()):
        weight.data = random(tuple(weight.shape), seed) / math.prod(weight.shape[1:]) ** 0.5
    given = MODELS["qwen"].arguments(device)
    return module.to(device), {**given, "controlnet_cond": random((1, 15, 16), 9, device)}


def residuals(rank: int, world: int, device: torch.device) -> tuple[Outputs, Outputs]:
    """Return what a split ControlNet and a whole one compute."""
    module, given = controlnet(device)
    with StayDouble(), torch.no_grad():
        whole = module(**given, return_dict=False)
    cuts = CUTS["QwenImageTransformer2DModel"]
    places = {path: place for path, place in cuts.places.items() if path != "proj_out"}
    places |= {"": Boundary(inputs={"hidden_states": IMAGE, "controlnet_cond": IMAGE}), "controlnet_blocks.*": OUT}
    body: Any = body_of(module, world, device, cuts=replace(cuts, places=places, forward=lambda module: None))
    with StayDouble(), torch.no_grad():
        split = body(**given, return_dict=False)
    body.release()
    return tuple(split), tuple(whole)


def test_each_block_of_a_controlnet_has_its_own_residual(ranks: Pool) -> None:
    for split, whole in ranks.run(3, residuals):
        assert len(split) == 2
        assert error(split, whole) < TOLERANCE
