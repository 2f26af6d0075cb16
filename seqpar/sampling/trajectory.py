"""One denoising run on this rank's tokens: sharded once before the first step, gathered once after the last.

Everything that depends only on timestep and labels is computed before the loop, as a table; a step reads rows of it
by a step counter that lives on the device, so nothing waits on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels.ddim import guide
from seqpar.mesh import Mesh
from seqpar.protocols import Attend, SequenceModel, rows, sharded, state_dtype
from seqpar.shard import Shard
from seqpar.transports._contract import Gather
from seqpar.transports.collective.point_to_point import gather

TABLE_BYTES = 2 << 30  # more than this, and the table is made for some steps at a time


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance (arXiv 2207.12598): u + scale (c - u) on the first `channels` of the latent.

    Off at scale <= 1. Original DiT guides 3 of 4 channels, diffusers all (None).
    scales: one scale for each evaluation of the model, instead of `scale`; the unconditional branch is computed at
    every step where one of them is over 1.
    """

    scale: float = 4.0
    channels: int | None = None
    scales: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for scale in (self.scale, *(self.scales or ())):
            if not math.isfinite(scale):
                raise ValueError(f"got guidance {scale}, expected a finite number; 1 or less is no guidance")

    @property
    def on(self) -> bool:
        """Whether there is an unconditional branch."""
        return max(self.scales or (self.scale,)) > 1

    def vector(self, evaluations: int) -> Tensor:
        """The scale of each evaluation of the model, fp64 on the CPU; ValueError where there are more or fewer."""
        scales = self.scales or (self.scale,) * evaluations
        if len(scales) != evaluations:
            raise ValueError(f"got {len(scales)} guidance scales, expected one for each of {evaluations} evaluations")
        return torch.tensor(scales, dtype=torch.float64)


@dataclass(frozen=True)
class Conditions:
    """Timesteps of all steps, (S,), and the labels of all N images, each (N,)."""

    timesteps: Tensor
    labels: Mapping[str, Tensor]


class Trajectory:
    """`tokens` is the state (n, l, C*p*p) of this rank's images and tokens, fp32 (fp64 for an fp64 model)."""

    tokens: Tensor

    def __init__(
        self,
        model: SequenceModel,
        mesh: Mesh,
        attend: Attend,
        swap: Callable[[Tensor], Gather],
        noise: Tensor,
        conditions: Conditions,
        guidance: Guidance,
    ) -> None:
        """`noise` is the whole (N, C, H, W), the same on every rank; `attend` is built for `batch_rows` rows.

        swap: returns the exchange of the guidance branches for a tensor like the state; asked only on a cfg axis.
        """
        check(model, mesh, noise, conditions, guidance)
        self._model, self._mesh, self._attend, self._guidance = model, mesh, attend, guidance
        self._images, self._size = noise.shape[0], (noise.shape[2], noise.shape[3])
        whole = model.patchify(noise)
        self._shard, self._mine = Shard(whole.shape[1], mesh.sequence.size), Shard(self._images, mesh.data.size)
        self.tokens = self.slice(noise).clone()  # a step writes here: never into what the caller holds
        self._positions = model.positions(*self._size)[self._shard.slice(mesh.sequence.rank)]
        self._width = whole.shape[2]
        self._timesteps = conditions.timesteps.to(mesh.device)
        self._labels, self._row_labels = self._distinct(conditions.labels)
        self._start = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._swap: Gather | None = None
        if mesh.cfg.size > 1:
            self._swap = swap(self.tokens)
        self._table: dict[str, Tensor] = {}
        self._count = max(1, len(next(iter(self._labels.values()), self._start[None])))  # distinct labels
        self._chunk = max(1, min(len(self._timesteps), TABLE_BYTES // max(1, self._count * self._row_bytes())))
        self._loaded = -1
        self._load(0)

    def restart(self, noise: Tensor, conditions: Conditions) -> bool:
        """Begin again with other noise, timesteps and labels, in the same buffers: a captured step stays true.

        Shapes are those of the first run, else ValueError. False, and nothing changed, where the number of different
        labels is another: the table has no room for them.
        """
        check(self._model, self._mesh, noise, conditions, self._guidance)
        shape, steps = (*noise.shape[:1], *noise.shape[2:]), len(conditions.timesteps)
        if shape != (self._images, *self._size) or steps != len(self._timesteps):
            raise ValueError(f"got another run's shape {shape} of {steps} steps, expected that of the first one")
        labels, row_labels = self._distinct(conditions.labels)
        if {name: len(label) for name, label in labels.items()} != {name: len(x) for name, x in self._labels.items()}:
            return False
        self._labels = labels
        self._row_labels.copy_(row_labels)
        self._timesteps = conditions.timesteps.to(self._mesh.device)
        self.tokens.copy_(self.slice(noise))
        self._loaded = -1
        self._load(0)
        return True

    def slice(self, x_BCHW: Tensor) -> Tensor:
        """My images' and tokens' part of something latent-shaped that every rank has whole."""
        dtype = state_dtype(next(self._model.parameters()).dtype)
        mine = self._model.patchify(x_BCHW[self._mine.slice(self._mesh.data.rank)].to(self._mesh.device, dtype))
        tokens = self._shard.slice(self._mesh.sequence.rank)
        return sharded(self._model, {"tokens": mine}, tokens)["tokens"].contiguous()

    def chunks(self) -> Iterator[range]:
        """All steps, in runs whose modulation is in the table together: usually one, the first is there already.

        Call `predict` for the steps of a chunk before asking for the next.
        """
        steps = len(self._timesteps)
        for start in range(0, steps, self._chunk):
            self._load(start)
            yield range(start, min(start + self._chunk, steps))

    def _load(self, start: int) -> None:
        """Compute the modulation of the chunk that begins at this step, where it is not in the table."""
        if start == self._loaded:
            return
        t = self._timesteps[start : start + self._chunk]
        # all rows on every rank, whatever the mesh: a matrix product of other shape may round differently
        every = {name: label.repeat(len(t)) for name, label in self._labels.items()}
        with torch.no_grad():
            made = self._model.condition(t.repeat_interleave(self._count), **every)
        if not self._table:
            self._table = dict(made)
        for name, table in self._table.items():  # where the first chunk was: a captured step reads from there
            table[: len(made[name])].copy_(made[name])
        self._start.fill_(start)
        self._loaded = start

    def branches(self, step: Tensor) -> tuple[Tensor, Tensor | None]:
        """The model's outputs for the state at a step (a device scalar): with the labels, and without (or None).

        Each is (n, l, at least C*p*p): variance channels, if any, come last.
        """
        batched = self._guidance.on and self._mesh.cfg.size == 1
        tokens = torch.cat((self.tokens, self.tokens)) if batched else self.tokens
        condition = rows(self._table, (step - self._start) * self._count + self._row_labels)
        out = self._model.forward_tokens({"tokens": tokens}, self._positions, condition, self._attend)
        if not self._guidance.on:
            return out, None
        cond, uncond = out.chunk(2) if batched else self._swapped(out[..., : self._width].to(self.tokens.dtype))
        return cond, uncond

    def predict(self, step: Tensor, scale: Tensor | None = None) -> Tensor:
        """The guided prediction (n, l, C*p*p) for the state at a step (a device scalar), in the state's dtype.

        scale: the guidance scale of this step, a device scalar; the run's one scale where None.
        """
        cond, uncond = self.branches(step)
        scaled = self._guidance.scale if scale is None else scale
        return guide(self.tokens, cond, uncond, scaled, self.guided_width)

    @property
    def guided_width(self) -> int:
        """How many of a token's leading values guidance applies to."""
        channels = self._guidance.channels
        return self._width if channels is None else channels * self._model.config.patch_size**2

    def gather(self, tokens: Tensor | None = None) -> Tensor:
        """The whole latents (N, C, H, W) on every rank, from the state or from something of its shape."""
        tokens = self.tokens if tokens is None else tokens
        if self._mesh.sequence.size > 1:
            tokens = gather(tokens, self._mesh.sequence, self._shard.sizes, dim=1)
        if self._mesh.data.size > 1:
            tokens = gather(tokens, self._mesh.data, self._mine.sizes)
        return self._model.unpatchify(tokens, *self._size)

    def _swapped(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """(conditional, unconditional): rank 0 of the cfg axis computes the first, rank 1 the second."""
        assert self._swap is not None
        self._swap.outbox().copy_(out[None])
        cond, uncond = self._swap.deliver()
        return cond, uncond

    def _distinct(self, labels: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Labels without repetitions, for all images and branches, and which of them each of my rows has."""
        labels = {name: label.to(self._mesh.device) for name, label in labels.items()}
        if not labels:
            return {}, torch.zeros(self._rows(), dtype=torch.int64, device=self._mesh.device)
        branches = [labels, self._model.null_labels(labels)] if self._guidance.on else [labels]
        table = torch.stack([torch.cat([branch[name] for branch in branches]) for name in labels], dim=1)
        distinct, index = table.unique(dim=0, return_inverse=True)
        index = index.view(len(branches), self._images)[:, self._mine.slice(self._mesh.data.rank)]
        index = index if self._mesh.cfg.size == 1 else index[self._mesh.cfg.rank : self._mesh.cfg.rank + 1]
        return dict(zip(labels, distinct.unbind(1), strict=True)), index.flatten()

    def _rows(self) -> int:
        return batch_rows(self._mesh, self._images, self._guidance)

    def _row_bytes(self) -> int:
        with torch.no_grad():
            one = self._model.condition(self._timesteps[:1], **{name: x[:1] for name, x in self._labels.items()})
        return sum(tensor.numel() * tensor.element_size() for tensor in one.values())


def batch_rows(mesh: Mesh, images: int, guidance: Guidance) -> int:
    """Rows of this rank's batch: its images, twice where both guidance branches are computed here."""
    return Shard(images, mesh.data.size).sizes[mesh.data.rank] * (2 if guidance.on and mesh.cfg.size == 1 else 1)


def check(model: SequenceModel, mesh: Mesh, noise: Tensor, conditions: Conditions, guidance: Guidance) -> None:
    """Raise ValueError for a run that this mesh or model cannot do."""
    config = model.config
    if noise.dim() != 4 or noise.shape[1] != config.in_channels:
        raise ValueError(f"got noise of shape {tuple(noise.shape)}, expected (N, {config.in_channels}, H, W)")
    model.check_size(*noise.shape[2:])
    check_layout(mesh.data.size, mesh.cfg.size, noise.shape[0], guidance, config.in_channels)
    if set(conditions.labels) != set(model.LABELS):
        raise ValueError(f"got labels {sorted(conditions.labels)}, expected {sorted(model.LABELS)}")
    for name, label in conditions.labels.items():
        if label.shape != noise.shape[:1]:
            raise ValueError(f"got {name} of shape {tuple(label.shape)}, expected ({noise.shape[0]},), one an image")


def check_layout(data: int, cfg: int, images: int, guidance: Guidance, channels: int) -> None:
    """Raise ValueError where images or guidance do not fit the sizes of the data and cfg axes."""
    if cfg > 1 and not guidance.on:
        raise ValueError(
            f"got cfg={cfg} with guidance {guidance.scale}, expected guidance > 1; without it "
            f"there is one branch: use cfg=1"
        )
    if images < data:
        raise ValueError(f"got {images} image(s) for data={data}, expected at least one a data rank")
    if guidance.channels is not None and not 1 <= guidance.channels <= channels:
        raise ValueError(f"got guidance on {guidance.channels} channels, expected 1 to {channels} or None for all")
