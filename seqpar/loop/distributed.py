"""`DistributedDiT`: a diffusion transformer on a mesh, called like the diffusers model.

It shards the inputs, runs the model on this rank's tokens with a sharded `attend`, and gathers the outputs. A diffusers
pipeline runs sharded after `pipe.transformer = DistributedDiT(pipe.transformer, mesh)`; our own loop
(`seqpar.loop.loop`) is faster, because it gathers once at the end instead of once per step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar._moved import successors
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.loop.blueprint import Blueprint, from_diffusers, locate
from seqpar.loop.interface import Encoded, SequenceModel, Split, checked_prompt
from seqpar.mesh.inputs import agree, broadcast, shapes
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard, check_tokens
from seqpar.mesh.watch import Calls
from seqpar.planner.plan import Plan, check_names, for_library, named_mesh, settled
from seqpar.planner.predict import TABLE_BYTES
from seqpar.planner.search import Preferences
from seqpar.transports.collective import gather
from seqpar.types.arguments import check_dense, check_dtype, check_floats, check_kind, is_not_finite
from seqpar.types.protocols import Attend

SCALARS = ("timestep", "guidance")  # inputs that may be one number for all images


class Inputs:
    """The inputs of a model's calls; caches which prompt was checked last."""

    def __init__(self, mesh: Mesh, model: SequenceModel) -> None:
        self._mesh, self._model = mesh, model
        self._right: list[tuple[weakref.ref[Tensor], object]] = []  # the prompt that was checked last

    def of_rank_0(self, inputs: Mapping[str, Tensor | float | None]) -> dict[str, Tensor]:
        """Rank 0's inputs on every rank, without arguments that are None. Collective: call on all ranks.

        Raises the same ValueError on every rank for inputs that the model does not take.
        """
        tensors, refused = {}, {}
        for name, value in inputs.items():
            try:
                tensors |= {} if value is None else {name: torch.as_tensor(value)}
            except (TypeError, ValueError, RuntimeError) as error:  # other ranks may have no error
                refused[f"argument {name}"] = f"{type(value).__name__}, which is no tensor ({error})"
        unusable, latents = _unusable(tensors), tensors.get("hidden_states")
        wants_gradients = latents is not None and latents.requires_grad
        form = {**shapes(tensors), "requires_grad": wants_gradients, **refused, **unusable}
        wrong = self._why_no_prompt(tensors) if self._mesh.is_main else None
        wrong = self._mesh.share(wrong, str | None) if agree(self._mesh, form, vote=wrong is not None) else None
        if refused:
            name, got = next(iter(refused.items()))
            raise ValueError(f"got {name} of type {got}, expected a tensor or a number")
        if wants_gradients:
            raise ValueError("hidden_states requires grad, but a sharded model supports inference only; detach it")
        for reason in (*unusable.values(), wrong):
            if reason is not None:
                raise ValueError(reason)
        shared = broadcast(self._mesh, tensors)
        _check(self._model, shared)
        return shared

    def _why_no_prompt(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Why the values of a prompt are invalid, or None. A pipeline passes the same labels at every step, and
        reading them waits for the device, so unchanged tensors are checked once.
        """
        prompt = {name: x for name, x in tensors.items() if name in self._model.PROMPT}
        if set(prompt) != set(self._model.PROMPT) or _unusable(prompt):
            return None  # another check raises
        seen = [x() for x, _ in self._right]
        same = len(seen) == len(prompt) and all(x is y for x, y in zip(seen, prompt.values(), strict=True))
        if same and [_version(x) for x in prompt.values()] == [version for _, version in self._right]:
            return None
        try:
            self._model.check_prompt(prompt)
        except ValueError as error:
            return str(error)
        self._right = [(weakref.ref(x), _version(x)) for x in prompt.values()]
        return None


def repeated(inputs: Mapping[str, Tensor], parts: int, device: torch.device) -> dict[str, Tensor]:
    """Move inputs to a device with one row per image, and repeat rows until there are `parts`."""
    rows, whole = len(inputs["hidden_states"]), {name: x.to(device) for name, x in inputs.items()}
    whole |= {name: whole[name].reshape(-1).expand(rows) for name in SCALARS if name in whole}
    if rows >= parts:
        return whole
    return {name: torch.cat([x] * -(-parts // rows))[:parts] for name, x in whole.items()}


def _check(model: SequenceModel, inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError for inputs of other names or shapes than the model's."""
    channels = model.config.in_channels
    if "hidden_states" not in inputs:
        raise ValueError(f"got no hidden_states, expected a tensor (B, {channels}, H, W)")
    x, labels = inputs["hidden_states"], inputs.keys() - {"hidden_states", "timestep"}
    if x.dim() not in (4, 5) or x.shape[1] != channels:
        raise ValueError(f"got hidden_states of shape {tuple(x.shape)}, expected (B, {channels}, H, W)")
    wanted = {*model.PROMPT}
    if "timestep" not in inputs or labels != wanted:
        names = ", ".join(("timestep", *sorted(wanted)))
        raise ValueError(f"got arguments timestep={'timestep' in inputs}, {sorted(labels)}, expected {names}")
    for name, value in inputs.items():
        one = name in SCALARS and value.numel() == 1
        if name in SCALARS and value.dim() > 1:
            raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected () or ({len(x)},)")
        if len(x) == 0 or (value.shape[:1] != x.shape[:1] and not one):
            expected = f"{len(x) or 'some'} rows, one per image"
            raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected {expected}")


def _version(x: Tensor) -> object:
    """A value that changes when a tensor is written to; inference tensors do not count writes."""
    return object() if x.is_inference() else x._version


def _unusable(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Why tensors of a call are invalid, by name."""
    reasons = {}
    for name, x in tensors.items():
        try:
            (check_floats if name == "hidden_states" else check_dense)(name, x)
            if x.is_complex():
                reasons[name] = f"got {name} of {x.dtype}, expected real numbers"
            if name in SCALARS and (x.dtype == torch.bool or is_not_finite(x)):
                reasons[name] = f"got {name} {x.tolist()}, expected finite numbers"
        except ValueError as error:
            reasons[name] = str(error)
    return {f"use of {name}": why for name, why in reasons.items()}


@dataclass(frozen=True)
class Share:
    """The inputs of a batch that stay the same between steps, on this rank.

    constant: tokens of the streams that are not denoised, (B, l, ...) each. positions: position rows of each stream
    that has positions, (l, ...) each. attend: the attention over all streams.
    """

    split: Split
    constant: Mapping[str, Tensor]
    positions: Mapping[str, Tensor]
    attend: Attend


def tokens_of(encoded: Encoded, split: Split, index_B: Tensor | None) -> dict[str, Tensor]:
    """This rank's tokens of the constant streams, copied to the rows of a batch unless `index_B` is None."""
    streams = {name: split.mine(name, x) for name, x in encoded.streams.items()}
    return streams if index_B is None else {name: x[index_B].contiguous() for name, x in streams.items()}


SIZES = 8  # cached tables of positions: new sizes must not fill the memory


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
        preferences = Preferences(strategy=strategy, local=local, transport=transport)
        own, preferences = _ranks_of(mesh, plan).on_all_ranks(lambda: _checked(mesh, preferences, plan))
        super().__init__()
        blueprint = None if isinstance(model, SequenceModel) else from_diffusers(model)
        config = model.config if blueprint is None else blueprint.config
        dtype = next(model.parameters()).dtype
        plan = plan_of(config, model, dtype, own, preferences) if plan is None else alone(plan, preferences)
        self.mesh = settled(plan, own)
        built = model if blueprint is None else blueprint.build(dtype, self.mesh.device)
        assert isinstance(built, SequenceModel)
        self.model, self.plan = built.to(self.mesh.device), plan
        self.strategy, self.local, self.transport = plan.strategy, plan.local, plan.transport
        self.keeper, self._calls = ExchangeCache(self.mesh, plan), Calls()
        self._inputs = Inputs(self.mesh, self.model)
        self._positions: dict[tuple[tuple[int, ...], Split], dict[str, Tensor]] = {}

    @classmethod
    @successors
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
    ) -> DistributedDiT:
        """Load a diffusers folder (pipeline or transformer), a hub id or a preset (random weights).

        The other arguments are those of the class. Raises the same ValueError on every rank, before any weights are
        loaded, if something does not fit.
        """
        ranks, preferences = _ranks_of(mesh, plan), Preferences(strategy=strategy, local=local, transport=transport)
        own, preferences = ranks.on_all_ranks(lambda: _checked(mesh, preferences, plan, path, dtype))
        blueprint = path if isinstance(path, Blueprint) else ranks.on_all_ranks(lambda: locate(path))
        plan = (
            plan_of(blueprint.config, blueprint.meta(), dtype, own, preferences)
            if plan is None
            else alone(plan, preferences)
        )
        own = settled(plan, own)
        model = blueprint.build(dtype, own.device, 0, own)
        return cls(model, own, plan=plan)

    @property
    def config(self) -> Any:
        """The config; it has sample_size, patch_size, in_channels and out_channels, as in diffusers."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float | None = None,
        return_dict: bool = True,
        **labels: Tensor | None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict (B, C_out, H, W) on every rank, without gradients.

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
        """This rank's rows of each stream's positions for a latent of this size, cached for the last sizes."""
        if (size, split) not in self._positions:
            for oldest in [*self._positions][: max(0, len(self._positions) + 1 - SIZES)]:
                del self._positions[oldest]
            rows = self.model.stream_positions(size, split.lengths)
            self._positions[size, split] = {name: split.mine(name, x, dim=0) for name, x in rows.items()}
        return self._positions[size, split]

    def share(
        self,
        encoded: Encoded,
        lengths: Mapping[str, int],
        size: tuple[int, ...],
        batch: int,
        index_B: Tensor | None = None,
        user: object | None = None,
    ) -> Share:
        """This rank's share of a batch.

        lengths: tokens of each stream that `encoded` does not hold. size: of the first stream's latent. index_B: the
        row of `encoded` for each row of the batch; None means the same rows. user: the object that needs the exchanges,
        as long as it exists.
        """
        counts = {**lengths, **{name: x.shape[1] for name, x in encoded.streams.items()}}
        split = Split.of(self.model, counts, self.keeper.axis, self.keeper.plan.exact)
        attend = self.keeper.attend(batch, split.tokens, user=user)
        return Share(split, tokens_of(encoded, split, index_B), self.positions(size, split), attend)

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank timed out waiting for another; this waits for the device."""
        self.keeper.check()

    def wait(self) -> None:
        """Wait for the device; raise TimeoutError as soon as a rank is known to have timed out."""
        self.keeper.wait(self.device)

    def release(self) -> None:
        """Free the buffers of all exchanges; the next call makes new ones. Collective: call on all ranks."""
        self._positions.clear()
        self.keeper.release()

    @property
    def state(self) -> object:
        """A key that is equal while exchanges and weights keep their addresses, so that a graph is valid."""
        return self.keeper.releases, self.dtype, tuple(parameter.data_ptr() for parameter in self.parameters())

    def check_size(self, *size: int) -> None:
        """Raise ValueError if a latent cannot be split into patches or has fewer tokens than ranks."""
        self.model.check_size(*size)
        if self.model.STATE[:1] == self.model.STREAMS:
            tokens = prod(side // own for side, own in zip(size, self.model.patch[-len(size) :], strict=True))
            parts = self.mesh.sequence.size
            check_tokens(Shard(tokens, parts), parts)

    def _predict(self, x: Tensor, t_B: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Predict all tokens of this batch, (B, L, C_out*p*p)."""
        model, axis, (name, *others) = self.model, self.mesh.sequence, self.model.STATE
        if others:
            raise ValueError(
                f"got a call of a model that denoises {', '.join(model.STATE)}, expected a single stream; use sample"
            )
        encoded, tokens = model.encode(**checked_prompt(model, inputs)), model.patchify(x)
        share = self.share(encoded, {name: tokens.shape[1]}, tuple(x.shape[2:]), len(x))
        streams = {**share.constant, name: share.split.mine(name, tokens)}
        conditioning = model.modulate(t_B, **encoded.pooled)
        out = model.forward_tokens(streams, share.positions, conditioning, share.attend)[name]
        self.check_delivered()
        return gather(out, axis, share.split.shard(name).sizes, dim=1) if axis.size > 1 else out


def _ranks_of(mesh: object, plan: object) -> Mesh:
    """The mesh, or one of all ranks; ValueError if only some ranks pass a mesh or a plan."""
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    given = ranks.collect((mesh is None, plan is None), tuple[bool, bool])
    for name, have in zip(("mesh", "plan"), zip(*given, strict=True), strict=True):
        if len(set(have)) > 1:
            raise ValueError(f"got a {name} on some ranks and none on others, expected the same {name} on all")
    return ranks


def _checked(
    mesh: Mesh | str | None, preferences: Preferences, plan: object, path: object = "", dtype: object = torch.float32
) -> tuple[Mesh | None, Preferences]:
    """The result of `named_mesh`; ValueError for an invalid mesh, plan, path, name or dtype."""
    check_kind("path", path, str, Path, Blueprint, expected="a name, folder or file of a model")
    check_dtype(dtype)
    check_kind("plan", plan, Plan, type(None), expected="a seqpar.planner.plan.Plan, or None")
    check_names(preferences.strategy, preferences.local, preferences.transport)
    return named_mesh(mesh, preferences)


def plan_of(config: Any, model: nn.Module, dtype: torch.dtype, mesh: Mesh | None, preferences: Preferences) -> Plan:
    """The planner's plan for a model with as many parameters as this one, the same on every rank."""
    count = sum(x.numel() for x in model.parameters())
    return for_library(config, count, dtype, mesh, preferences, TABLE_BYTES)


def alone(plan: Plan, preferences: Preferences) -> Plan:
    """The caller's plan; ValueError if names are given as well, because the plan decides them."""
    if preferences != Preferences():
        raise ValueError("a plan contains mesh, strategy, local and transport; pass either the plan or these names")
    return plan
