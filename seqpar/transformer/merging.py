"""LoRAs in a transformer's own weights: those of a run's files, or those that each order of a server names.

A layer's weight becomes base + the sum of scale * alpha / rank * B A, computed in fp32 (fp64 for fp64) and rounded
once, in the memory where it lies. So captured graphs and fused blocks read it on the same addresses, and nothing of
peft takes part in a call.
When it wins: against adapters beside the weights, two small products for each layer in every step. diffusers' own
functions for LoRAs, which act on adapters, cannot undo it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.transformer.lora import LoraTerm, base_of, layer_at, layers, term_of, why_not_plain, with_terms

Wanted = tuple[tuple[str, float], ...]
"""Names of LoRAs, in the order in which they are added, with their scales."""
Terms = Mapping[str, LoraTerm]
"""Path of a layer -> what a LoRA adds to it."""


def terms_of(module: nn.Module, name: str) -> dict[str, LoraTerm]:
    """Return what an adapter of peft adds to each layer; ValueError where that is more than a matrix to a weight."""
    terms = dict[str, LoraTerm]()
    for path, layer in layers(module):
        wrapper: Any = layer
        if name not in wrapper._get_available_adapters():
            continue
        base: Any = base_of(wrapper)
        reason = why_not_plain(wrapper, name)
        if type(base) is not nn.Linear or not base.weight.is_floating_point() or base.weight.itemsize < 2:
            reason = f"wraps a {type(base).__name__} of {base.weight.dtype}"
        if reason is not None:
            raise ValueError(f"got an adapter on {path} that {reason}, expected a plain LoRA of linear layers")
        terms[path] = term_of(wrapper, name)
    return terms


class Merging:
    """The LoRAs of a transformer, of which any are merged into its weights.

    module: the transformer; or a pipeline, if paths begin with the names of its transformers. every: name of a LoRA ->
    what it adds. keeps: whether the weights without LoRAs are kept beside the merged ones, in one room for the layers
    of all LoRAs, so that others can be merged later.
    """

    def __init__(self, module: Any, every: Mapping[str, Terms], keeps: bool) -> None:
        self._every = every
        self._layers: dict[str, Any] = {path: layer_at(module, path) for each in every.values() for path in each}
        self._kept = {path: _copied(layer) for path, layer in self._layers.items()} if keeps else {}
        self.merged: Wanted = ()

    @torch.no_grad()
    def switch(self, wanted: Wanted) -> bool:
        """Merge these LoRAs and no others; return whether a weight was written. ValueError for an unknown name.

        Every rank must call this alike. The device writes after what was queued before.
        """
        if unknown := [name for name, _ in wanted if name not in self._every]:
            known = ", ".join(self._every) or "none: the model was loaded without"
            raise ValueError(f"got the LoRA {unknown[0]}, expected one of {known}")
        if wanted == self.merged:
            return False
        for path in dict.fromkeys(path for name, _ in (*self.merged, *wanted) for path in self._every[name]):
            self._write(path, wanted)
        self.merged = wanted
        return True

    def _write(self, path: str, wanted: Wanted) -> None:
        """Write weight and bias of a layer, from those without LoRAs."""
        layer = self._layers[path]
        own, own_bias = self._kept.get(path, (layer.weight, layer.bias))
        mine = [(self._every[name][path], scale) for name, scale in wanted if path in self._every[name]]
        weight, bias = with_terms(own, own_bias, mine) if mine else (own, None)
        layer.weight.copy_(weight)
        if own_bias is not None:
            layer.bias.copy_(own_bias if bias is None else bias)


def _copied(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach().clone(), None if layer.bias is None else layer.bias.detach().clone()
