"""What FLUX.1 makes of timestep, guidance scale and pooled text: one vector, and from it the modulation of all blocks.

`modulate` computes a table before the loop; `modulate_call` computes the rows of one call inside its CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.models import _layers
from seqpar.types.fused import Spread
from seqpar.types.protocols import Condition, SequenceModel, state_dtype

FREQUENCIES = 256  # width of the sinusoids of timestep and guidance


def alone(widths: Sequence[int], make: Callable[[int], Tensor]) -> list[Tensor]:
    """Compute all results here; see `Spread`."""
    return [make(index) for index in range(len(widths))]


class Conditioned(SequenceModel):
    """The embedders of FLUX.1 and its blocks, each with a layer `modulation`; a subclass runs the blocks.

    double: makes a block of two `parts` with 6 modulation vectors each. single: makes a block with 3.
    """

    def __init__(self, config: Any, double: Callable[[], nn.Module], single: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config, width, self.EMBEDS_GUIDANCE = config, config.width, config.guidance_embeds
        self.t_embedder = _embedder(FREQUENCIES, width)
        if config.guidance_embeds:
            self.g_embedder = _embedder(FREQUENCIES, width)
        self.pooled_embedder = _embedder(config.pooled_projection_dim, width)
        self.blocks = nn.ModuleList(double() for _ in range(config.num_layers))
        self.single = nn.ModuleList(single() for _ in range(config.num_single_layers))
        self.final_modulation = nn.Linear(width, 2 * width)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.final_modulation.weight.dtype

    def modulate(self, t_R: Tensor, **pooled: Tensor) -> Condition:
        """Return {"blocks": (R, layers, 2, 6, E), "single": (R, layers, 3, E), "final": (R, 2, E)} in fp32 (or fp64).

        t_R: timesteps from 0 to 1000. pooled: `pooled_projections` (R, P), and `guidance` (R,) if it is embedded.
        A double block has shift, scale and gate of attention, then of the MLP, for each stream of `STREAMS`; a single
        block has shift, scale and gate; the final rows are scale, then shift.
        As in diffusers, timestep and guidance are rounded to the dtype of the weights before they are embedded: near
        1000 a bf16 number is off by up to 2, which the sinusoids show. Nothing else is rounded.
        """
        narrow = self.dtype
        wide = state_dtype(narrow)
        c_RE = self._condition(t_R.to(narrow) / 1000, pooled.get("guidance"), pooled["pooled_projections"], wide)
        return self._table([*map(_layers.through(c_RE, wide), self._modulations())])

    def modulate_call(
        self, timestep_R: Tensor, guidance_R: Tensor | None, pooled_RP: Tensor, spread: Spread = alone
    ) -> Condition:
        """Return what `modulate` returns for one call of diffusers' transformer, in few kernels, inside its graph.

        timestep_R: diffusers' timestep, from 0 to 1. The condition has the dtype of the weights, as in diffusers; its
        products with the weights of the blocks are kept in fp32 on GPUs. There is one product for each layer, which
        reads its weights once, and one addition of all biases. spread: see `Spread`; on N ranks that share the
        products, each reads an Nth of these weights (a quarter of the model), with the same bits.
        """
        layers = self._modulations()
        c_RE = self._condition(timestep_R, guidance_R, pooled_RP, self.dtype)
        widths = [len(layer.weight) for layer in layers]
        table = self._table(spread(widths, lambda index: _layers.product(c_RE, layers[index].weight)))
        biases = self._table([layer.bias[None] for layer in layers])
        return {name: rows + biases[name] for name, rows in table.items()}

    def _condition(
        self, timestep_R: Tensor, guidance_R: Tensor | None, pooled_RP: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return SiLU of the sum of all embeddings, (R, E), computed in `dtype`; timestep_R: from 0 to 1."""
        if (guidance_R is not None) != self.EMBEDS_GUIDANCE:
            expected = "one for each row" if self.EMBEDS_GUIDANCE else "none: this model does not embed it"
            raise ValueError(f"got {'a' if guidance_R is not None else 'no'} guidance scale, expected {expected}")
        narrow = self.dtype
        scaled = [x.to(narrow) * 1000 for x in (timestep_R, guidance_R) if x is not None]
        embedders = [self.t_embedder, self.g_embedder] if self.EMBEDS_GUIDANCE else [self.t_embedder]
        sines = _layers.sinusoid(torch.cat(scaled), FREQUENCIES).chunk(len(scaled))
        made = [_embed(x, layer, dtype) for x, layer in zip(sines, embedders, strict=True)]
        return F.silu(sum(made[1:], made[0]) + _embed(pooled_RP, self.pooled_embedder, dtype))

    def _modulations(self) -> list[nn.Linear]:
        """Return the layers that make the modulation, in the order of the table."""
        double: list[Any] = list(self.blocks)
        single: list[Any] = list(self.single)
        parts = [part for block in double for part in block.parts]
        return [*(part.modulation for part in (*parts, *single)), self.final_modulation]

    def _table(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the rows that the layers of `_modulations` made as the tensors of the condition."""
        double, single = 2 * len(self.blocks), len(self.single)
        shape = len(self.blocks), 2, 6, -1
        blocks = torch.cat([*rows[:double]], dim=1).unflatten(1, shape)
        singles = torch.cat([*rows[double : double + single]], dim=1).unflatten(1, (single, 3, -1))
        return {"blocks": blocks, "single": singles, "final": rows[-1].unflatten(1, (2, -1))}


def _embedder(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))


def _embed(x_RC: Tensor, embedder: nn.Sequential, dtype: torch.dtype) -> Tensor:
    first, _, second = embedder
    return _layers.linear(F.silu(_layers.linear(x_RC, first, dtype)), second, dtype)
