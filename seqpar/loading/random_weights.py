"""Random weights for presets."""

from __future__ import annotations

import torch
from torch import nn

INIT_STD = 0.02  # standard deviation of the random weights of presets


def randomise(model: nn.Module, seed: int) -> None:
    """Set normally distributed matrices, norm weights of one and zero biases, reproducibly on one device type."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
