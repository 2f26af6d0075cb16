"""GEMMs of our own models in 8 bits: their calibration, and matrices that follow what is written to the weights.

Means and ways to sum come from a fixed run of the whole model in its own dtype: some classes, a fixed noise, few steps
from the first timestep to the last (`seqpar.transformer.calibration`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn

from seqpar.families._block import Input, Matrix, unrounded
from seqpar.families._matrix8 import Matrix8, quantised
from seqpar.kernels.rows8 import Rounding
from seqpar.loop.interface import MatrixBlock
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.calibration import (
    Calibration,
    Inputs,
    as_text,
    calibration_of,
    kept_or_measured,
    numbers_of,
    path_of,
    why_not_here,
    why_odd,
)
from seqpar.types.protocols import Prepare, Projected
from seqpar.types.say import say

CLASSES, STEPS = 3, 4  # of the calibration: means need few tokens
SCHEDULE = {"beta_start": 1e-4, "beta_end": 0.02, "clip_sample": False, "timestep_spacing": "linspace"}


def blocks_of(model: nn.Module) -> dict[str, MatrixBlock]:
    """Return path -> block of the blocks whose GEMMs can compute in 8 bits."""
    return {path: part for path, part in model.named_modules() if isinstance(part, MatrixBlock)}


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """Return the matrices that compute in 8 bits, by the paths of their linear layers, with the weights as they are."""
    return {f"{path}.{name}": block.matrix(name) for path, block in blocks_of(model).items() for name in block.MATRICES}


def why_not(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model, which may lack its weights, cannot compute in 8 bits on a device, or None."""
    matrices = matrices_of(model)
    if not matrices:
        return f"{type(model).__module__}.{type(model).__name__} has no blocks that compute in 8 bits"
    reason = why_not_here(device, dtype)
    return why_odd(x.weight for x in matrices.values()) if reason is None and device.type == "cuda" else reason


@contextmanager
def computing(model: nn.Module, matrices: Mapping[str, Matrix]) -> Iterator[None]:
    """Let the blocks of a model compute with these matrices in this context, by their paths; others are their own."""
    blocks = blocks_of(model)
    for path, block in blocks.items():
        names = {name: f"{path}.{name}" for name in block.MATRICES}
        block.others = {name: matrices[key] for name, key in names.items() if key in matrices}
    try:
        yield
    finally:
        for block in blocks.values():
            block.others = {}


@dataclass(frozen=True)
class WatchedMatrix(Matrix):
    """`Matrix` that shows its inputs."""

    look: Callable[[Tensor], None]

    def __call__(self, x_BlE: Input) -> Tensor:
        self.look(unrounded(x_BlE))
        return super().__call__(x_BlE)

    def gelu(self, x_BlE: Input, reader: Matrix | None = None) -> Input:
        self.look(unrounded(x_BlE))
        return super().gelu(x_BlE, reader)

    def swiglu(
        self, x_BlE: Input, reader: Matrix | None = None, *, tokens: int | None = None, gate_last: bool = False
    ) -> Input:
        self.look(unrounded(x_BlE))
        return super().swiglu(x_BlE, reader, tokens=tokens, gate_last=gate_last)

    def projected(self, x_BlE: Input, heads: int, prepare: Prepare, kv_heads: int | None = None) -> Projected:
        self.look(unrounded(x_BlE))
        return super().projected(x_BlE, heads, prepare, kv_heads)


def calibrated(model: nn.Module, mesh: Mesh, alone: Callable[[], Callable[..., Any]]) -> Calibration:
    """Return the calibration of a model of classes, from the cache or by a fixed run, and print it. Collective.

    alone: returns the model on one rank, called as diffusers' model is. Rank 0's numbers are everybody's.
    """
    config: Any = model.config
    matrices = matrices_of(model)

    def measured() -> Mapping[str, Tensor]:
        seen = {key: Inputs() for key in matrices}
        observed = {key: WatchedMatrix(x.weight, x.bias, seen[key].look) for key, x in matrices.items()}
        with computing(model, observed), torch.no_grad():
            fixed_run(config, alone(), next(model.parameters()).device)
            return numbers_of(seen, {key: [x.weight] for key, x in matrices.items()})

    settings = type(model).__module__, config, labels_of(config), STEPS, SCHEDULE, [*matrices]
    path = path_of(settings, model.named_parameters())
    known = calibration_of(kept_or_measured(mesh, path, measured), {key: key for key in matrices})
    if mesh.is_main:
        say(as_text({"model": known}, len(matrices), "by fixed classes"))
    return known


def labels_of(config: Any) -> list[int]:
    """Return the labels of the calibration: the first classes, as every model was trained on them, and "no class"."""
    return [*range(min(CLASSES, config.num_classes)), config.num_classes]


def fixed_run(config: Any, predict: Callable[..., Any], device: torch.device) -> None:
    """Denoise images of the calibration's labels, from the first timestep to the last. predict: as diffusers' model."""
    labels = torch.tensor(labels_of(config), device=device)
    size = len(labels), config.in_channels, config.sample_size, config.sample_size
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    scheduler: Any = DDIMScheduler.from_config(SCHEDULE)
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        noise = predict(x, timestep=t.to(device), class_labels=labels).sample[:, : config.in_channels]
        x = scheduler.step(noise, t, x).prev_sample


class Matrices8:
    """The matrices of a model in 8 bits, by the paths of their layers; those of too rough GEMMs keep their dtype.

    They are copies: `follow` rounds them again, in the same memory, when weights were written in place or moved.
    """

    def __init__(self, model: nn.Module, known: Calibration) -> None:
        blocks = blocks_of(model)
        self._layers: dict[str, tuple[Any, str]] = {
            f"{path}.{name}": (block._modules, name) for path, block in blocks.items() for name in block.MATRICES
        }
        matrices = matrices_of(model)
        self.outside = len(matrices.keys() & known.rough)  # GEMMs that keep their dtype
        self.by_path = dict[str, Matrix8]()
        for key, matrix in matrices.items():
            mean = known.means.get(key)
            reads = Rounding(None if mean is None else mean.to(matrix.weight.device))
            if key not in known.rough:
                self.by_path[key] = quantised(matrix, reads, key in known.fast)
        self._written = self._versions()

    def follow(self) -> None:
        """Round weights again if some were written in place, or moved, since the last call."""
        if self._versions() != self._written:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round all weights again, into the same memory, which CUDA graphs read. The means stay."""
        for key, old in self.by_path.items():
            layer = self._layer(key)
            new = quantised(Matrix(layer.weight, layer.bias), old.reads, old.fast, old)
            old.scales.copy_(new.scales)
            if old.reads.centre_E is not None and old.folded is not None and new.folded is not None:
                old.folded.copy_(new.folded)
                new = replace(new, folded=old.folded)
            self.by_path[key] = replace(new, scales=old.scales)
        self._written = self._versions()

    def __str__(self) -> str:
        fast = sum(matrix.fast for matrix in self.by_path.values())
        return f"{len(self.by_path)} of {len(self.by_path) + self.outside} in 8 bits, {fast} with fast sums"

    def _layer(self, key: str) -> Any:
        modules, name = self._layers[key]
        return modules[name]

    def _versions(self) -> Sequence[object]:
        tables = [
            modules[name]._parameters for modules, name in self._layers.values()
        ]  # a layer's own are slow to read
        weights = [x for table in tables for x in table.values() if x is not None]
        return [(x.data_ptr(), None if x.is_inference() else x._version) for x in weights]
