"""Random weights for models that are timed without their checkpoints."""

from __future__ import annotations

from torch import Generator, nn

INIT_STD = 0.02


def randomise(model: nn.Module, seed: int) -> None:
    """Set normally distributed matrices, norm weights of one and zero biases, reproducibly on one device type."""
    generator = Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
