"""Plants outliers in a model's weights: a few channels of every matrix become much larger than the others.

Trained transformers have such channels, random weights have none. With them sums cancel, scores of attention grow, and
one channel decides the statistics of a norm, so that arithmetic which is too narrow shows.
"""

from __future__ import annotations

import torch
from torch import nn

TIMES = 8.0  # a power of two, so that the planted weights are the same numbers in every data type
SHARE = 128  # one channel of this many, and at least one


@torch.no_grad()
def plant(model: nn.Module, seed: int = 0) -> int:
    """Multiply a few rows of every linear layer but the last, in place, and return the number of rows.

    A row makes one channel of a layer's output; its bias is multiplied, too. The rows depend on the seed alone.
    """
    generator = torch.Generator().manual_seed(seed)
    planted = 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not getattr(model, "final", None):
            rows = torch.randperm(layer.out_features, generator=generator)[: max(1, layer.out_features // SHARE)]
            layer.weight[rows.to(layer.weight.device)] *= TIMES
            if layer.bias is not None:
                layer.bias[rows.to(layer.bias.device)] *= TIMES
            planted += len(rows)
    return planted
