"""Builds a pipeline of random weights, which are made on the device: its transformer, decoder and scheduler."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import nn
from torch.overrides import TorchFunctionMode

from seqpar.loading.names import RandomModel, building

INIT_STD = 0.02  # standard deviation of random weights


def randomise(model: nn.Module, seed: int) -> None:
    """Set normally distributed matrices, norm weights of one and zero biases, reproducibly on one device type."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


class WithoutValues(TorchFunctionMode):
    """Skips the random initial values of modules: the meta device has none, and torch imports its compiler for them."""

    SKIPPED = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.xavier_uniform_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor as it is from functions that set initial values, and what other functions return."""
        kwargs = kwargs or {}
        if func in self.SKIPPED:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


WITHOUT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")  # parts for which random texts stand in


def random_pipeline(random: RandomModel, kind: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a pipeline of random weights without encoders; its weights are equal on ranks of one device type.

    kind: the class of diffusers that has its parts.
    """
    parts: dict[str, Any] = dict.fromkeys(WITHOUT)
    for name, (model, config) in random.parts.items():
        parts[name] = _model(getattr(diffusers, model), config, dtype, device)
    return kind(**parts)


def _model(kind: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if not issubclass(kind, torch.nn.Module):
        return kind(**config)
    with no_init_weights(), torch.device(device), building(dtype):
        model = kind(**config)
    randomise(model, 0)
    return model.requires_grad_(False).eval()
