"""`DistributedDiT`: a diffusion transformer that runs on a mesh and is called like the diffusers model.

It shards the inputs, runs the model on this rank's tokens with a sharded `attend`, and gathers the outputs. A diffusers
pipeline runs sharded after `pipe.transformer = DistributedDiT(pipe.transformer, mesh)`.
When it wins: on several GPUs; our own loop (`seqpar.loop.run`) is faster than a diffusers pipeline, because it
gathers once at the end instead of once a step.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar.graphs.exchanges import Keeper
from seqpar.loop.blueprint import Blueprint, from_diffusers, locate
from seqpar.loop.inputs import Inputs, repeated
from seqpar.loop.interface import SequenceModel
from seqpar.loop.share import Share
from seqpar.loop.streams import Split, completed
from seqpar.mesh.deadlines import Calls
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard, check_tokens
from seqpar.planner.plan import Plan, check_names, for_library, named_mesh
from seqpar.planner.predict import TABLE_BYTES
from seqpar.planner.search import Wish
from seqpar.planner.settled import settled
from seqpar.transports.collective.point_to_point import gather
from seqpar.types.arguments import check_dtype, check_kind

SIZES = 8  # tables of positions that are kept: new sizes must not fill the memory


class DistributedDiT(nn.Module):
    """A sequence-parallel diffusion transformer.

    model: a `seqpar` model or a diffusers transformer, whose weights are used unchanged. mesh, strategy, local,
    transport: the caller's choices; the planner decides once on those that are None or "auto", for one guided picture
    of the model's own size. mesh may be what `--mesh` takes, as "cfg=2,ulysses=2". plan: a plan that was made before
    (`seqpar.planner.plan`), in place of names.
    The attributes `plan`, `strategy`, `local` and `transport` hold the choices and their reasons.
    Raises ValueError if model, mesh, names and plan do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | str | None = None,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
    ) -> None:
        wish = Wish(strategy=strategy, local=local, transport=transport)
        own, wish = _ranks_of(mesh, plan).together(lambda: _checked(mesh, wish, plan))
        super().__init__()
        blueprint = None if isinstance(model, SequenceModel) else from_diffusers(model)
        config = model.config if blueprint is None else blueprint.config
        dtype = next(model.parameters()).dtype
        plan = plan_of(config, model, dtype, own, wish) if plan is None else alone(plan, wish)
        self.mesh = settled(plan, own)
        built = model if blueprint is None else blueprint.build(dtype, self.mesh.device)
        assert isinstance(built, SequenceModel)
        self.model, self.plan = built.to(self.mesh.device), plan
        self.strategy, self.local, self.transport = plan.strategy, plan.local, plan.transport
        self.keeper, self._calls = Keeper(self.mesh, plan), Calls()
        self._inputs = Inputs(self.mesh, self.model)
        self._positions: dict[tuple[tuple[int, ...], Split], dict[str, Tensor]] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Blueprint,
        mesh: Mesh | str | None = None,
        dtype: torch.dtype = torch.float32,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
        heads: int | None = None,
    ) -> DistributedDiT:
        """Load a diffusers folder (pipeline or transformer), original files, a hub id or a preset (random weights).

        heads: the number of heads, where original files do not say it; see `seqpar.loop.blueprint.locate`. The other
        arguments are those of the class. Raises the same ValueError on every rank, before any weights are
        loaded, if something does not fit.
        """
        ranks, wish = _ranks_of(mesh, plan), Wish(strategy=strategy, local=local, transport=transport)
        own, wish = ranks.together(lambda: _checked(mesh, wish, plan, path, dtype))
        blueprint = path if isinstance(path, Blueprint) else ranks.together(lambda: locate(path, heads))
        plan = plan_of(blueprint.config, blueprint.meta(), dtype, own, wish) if plan is None else alone(plan, wish)
        own = settled(plan, own)
        model = blueprint.build(dtype, own.device, 0, own)
        return cls(model, own, plan=plan)

    @property
    def config(self) -> Any:
        """Return the config; it has sample_size, patch_size, in_channels and out_channels, as in diffusers."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Return the device on which this rank computes."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float | None = None,
        return_dict: bool = True,
        **labels: Tensor | None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Return the prediction (B, C_out, H, W) on every rank, without gradients.

        hidden_states: (B, C, H, W). timestep: () or (B,). labels: (B,) each. Every rank uses rank 0's inputs; those of
        other ranks must have the same shapes and dtypes. The data and cfg axes split the batch; if it has fewer rows
        than such ranks, some of them compute the same row. Raises the same ValueError on every rank for inputs that do
        not fit.
        """
        shared = self._inputs.of_rank_0({"hidden_states": hidden_states, "timestep": timestep, **labels})
        self.check_size(*shared["hidden_states"].shape[2:])
        (rows, _, *size), data, cfg = shared["hidden_states"].shape, self.mesh.data, self.mesh.cfg
        parts = data.size * cfg.size
        inputs = repeated(shared, parts, self.device)
        batch = Shard(len(inputs["hidden_states"]), parts)
        mine = batch.slice(data.rank * cfg.size + cfg.rank)
        inputs = {name: value[mine] for name, value in inputs.items()}
        is_first = self._calls.is_first(tuple((name, x.shape) for name, x in sorted(shared.items())))
        with self.mesh.call(self.mesh.world, "a call of the transformer", is_first):
            out = self._predict(inputs.pop("hidden_states"), inputs.pop("timestep"), inputs)
            sizes = [batch.sizes[d * cfg.size : (d + 1) * cfg.size] for d in range(data.size)]
            out = gather(out, cfg, sizes[data.rank]) if cfg.size > 1 else out
            out = gather(out, data, tuple(map(sum, sizes))) if data.size > 1 else out
        sample = self.model.unpatchify(out[:rows], *size).to(shared["hidden_states"].dtype)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def positions(self, size: tuple[int, ...], split: Split) -> dict[str, Tensor]:
        """Return this rank's rows of each stream's positions for a latent of this size, kept for the last sizes."""
        if (size, split) not in self._positions:
            for oldest in [*self._positions][: max(0, len(self._positions) + 1 - SIZES)]:
                del self._positions[oldest]
            rows = self.model.stream_positions(size, split.lengths)
            self._positions[size, split] = {name: split.mine(name, x, dim=0) for name, x in rows.items()}
        return self._positions[size, split]

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self.keeper.check()

    def wait(self) -> None:
        """Wait for the device, and raise TimeoutError as soon as it is known that a rank waits in vain."""
        self.keeper.wait(self.device)

    def release(self) -> None:
        """Free the buffers of all exchanges, on all ranks at the same time; the next call makes new ones."""
        self._positions.clear()
        self.keeper.release()

    @property
    def state(self) -> object:
        """Return a key that stays equal while exchanges and weights keep their addresses, so that a graph is valid."""
        return self.keeper.releases, self.dtype, tuple(parameter.data_ptr() for parameter in self.parameters())

    def check_size(self, *size: int) -> None:
        """Raise ValueError if a latent cannot be split into patches or has fewer tokens than ranks."""
        self.model.check_size(*size)
        if self.model.STATE[:1] == self.model.STREAMS:
            tokens = prod(side // own for side, own in zip(size, self.model.patch[-len(size) :], strict=True))
            parts = self.mesh.sequence.size
            check_tokens(Shard(tokens, parts), parts)

    def _predict(self, x: Tensor, t_B: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the predictions of all tokens for this batch, (B, L, C_out*p*p)."""
        model, axis, (name, *others) = self.model, self.mesh.sequence, self.model.STATE
        if others:
            raise ValueError(
                f"got a call of a model that denoises {', '.join(model.STATE)}, expected one stream; use sample"
            )
        encoded, tokens = model.encode(**completed(model, inputs)), model.patchify(x)
        where = partial(self.positions, tuple(x.shape[2:]))
        share = Share.of(model, self.keeper, encoded, {name: tokens.shape[1]}, where, len(x))
        conditioning = model.modulate(t_B, **encoded.pooled)
        out = model.forward_tokens(*share.inputs({name: share.split.mine(name, tokens)}, conditioning))[name]
        self.check_delivered()
        return gather(out, axis, share.split.shard(name).sizes, dim=1) if axis.size > 1 else out


def _ranks_of(mesh: object, plan: object) -> Mesh:
    """Return the mesh, or one on which all ranks can learn that it is none; ValueError if only some ranks have one.

    The same for a plan, which ranks without one would make together.
    """
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    given = ranks.collect((mesh is None, plan is None), tuple[bool, bool])
    for name, have in zip(("mesh", "plan"), zip(*given, strict=True), strict=True):
        if len(set(have)) > 1:
            raise ValueError(f"got a {name} on some ranks and none on others, expected the same {name} on all")
    return ranks


def _checked(
    mesh: Mesh | str | None, wish: Wish, plan: object, path: object = "", dtype: object = torch.float32
) -> tuple[Mesh | None, Wish]:
    """Return what `named_mesh` does, and refuse a mesh, plan, path, name or dtype that is none."""
    check_kind("path", path, str, Path, Blueprint, expected="a name, folder or file of a model")
    check_dtype(dtype)
    check_kind("plan", plan, Plan, type(None), expected="a seqpar.planner.plan.Plan, or None")
    check_names(wish.strategy, wish.local, wish.transport)
    return named_mesh(mesh, wish)


def plan_of(config: Any, model: nn.Module, dtype: torch.dtype, mesh: Mesh | None, wish: Wish) -> Plan:
    """Return the planner's plan for a model with as many parameters as this one; it is the same on every rank."""
    count = sum(x.numel() for x in model.parameters())
    return for_library(config, count, dtype, mesh, wish, TABLE_BYTES)


def alone(plan: Plan, wish: Wish) -> Plan:
    """Return the caller's plan; `ValueError` if names are given as well, because the plan already decides them."""
    if wish != Wish():
        raise ValueError("got a plan and names of mesh, strategy, local or transport, expected one: a plan has all")
    return plan
