"""`DistributedDiT`: a diffusion transformer that runs on a mesh and is called like the diffusers model.

It shards the inputs, runs the model on this rank's tokens with a sharded `attend`, and gathers the outputs. A diffusers
pipeline runs sharded after `pipe.transformer = DistributedDiT(pipe.transformer, mesh)`.
When it wins: on several GPUs; our own loop (`seqpar.sampling.run`) is faster than a diffusers pipeline, because it
gathers once at the end instead of once a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar.arguments import check_dense, check_dtype, check_floats, check_kind
from seqpar.deadlines import Calls
from seqpar.engine.kept import Kept
from seqpar.inputs import agree, broadcast, shapes
from seqpar.mesh import Axis, Mesh
from seqpar.planner.plan import Plan, for_library, load_local, load_strategy, load_transport
from seqpar.planner.predict import TABLE_BYTES
from seqpar.planner.search import Wish
from seqpar.protocols import Attend, SequenceModel
from seqpar.shard import Shard, Tokens, check_tokens
from seqpar.streams import Split, completed
from seqpar.transports._contract import Gather
from seqpar.transports.collective.point_to_point import gather
from seqpar.watch import drain
from seqpar.weights.find import Blueprint, from_diffusers, locate

SCALARS = ("timestep", "guidance")  # inputs that may be one number for all images
KINDS = 8  # attentions and tables of positions that are kept: new sizes must not fill the memory
GATHERS = 32  # gathers that are kept; a run has one or two for each stream of its state


class DistributedDiT(nn.Module):
    """A sequence-parallel diffusion transformer.

    model: a `seqpar` model or a diffusers transformer, whose weights are used unchanged. mesh, strategy, local,
    transport: the caller's choices; the planner decides once on those that are None or "auto", for one guided picture
    of the model's own size. plan: a plan that was made before (`seqpar.planner.plan`), in place of names.
    The attributes `plan`, `strategy`, `local` and `transport` hold the choices and their reasons.
    Raises ValueError if model, mesh, names and plan do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
    ) -> None:
        _ranks_of(mesh).together(lambda: _check_choices(mesh, plan))
        super().__init__()
        blueprint = None if isinstance(model, SequenceModel) else from_diffusers(model)
        config = model.config if blueprint is None else blueprint.config
        dtype = next(model.parameters()).dtype
        wish = Wish(strategy=strategy, local=local, transport=transport)
        plan = plan_of(config, model, dtype, mesh, wish) if plan is None else alone(plan, wish)
        self.mesh = settled(plan, mesh)
        built = model if blueprint is None else blueprint.build(dtype, self.mesh.device)
        assert isinstance(built, SequenceModel)
        self.model, self.plan = built.to(self.mesh.device), plan
        self.strategy, self.local, self.transport = plan.strategy, plan.local, plan.transport
        self._moves = load_transport(self.transport.name)
        self._attends = Kept[Attend](self.mesh.sequence, KINDS)
        self._gathers = Kept[Gather](self.mesh.replica, GATHERS)
        self._releases, self._calls = 0, Calls()
        self._right: list[tuple[weakref.ref[Tensor], object]] = []  # the prompt that was found right last
        self._positions: dict[tuple[tuple[int, ...], Split], dict[str, Tensor]] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Blueprint,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.float32,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
        heads: int | None = None,
    ) -> DistributedDiT:
        """Load a diffusers folder (pipeline or transformer), original files, a hub id or a preset (random weights).

        heads: the number of heads, where original files do not say it; see `seqpar.weights.find.locate`. The other
        arguments are those of the class. Raises the same ValueError on every rank, before any weights are
        loaded, if something does not fit.
        """
        ranks = _ranks_of(mesh)
        ranks.together(lambda: _check_choices(mesh, plan, path, dtype))
        blueprint = path if isinstance(path, Blueprint) else ranks.together(lambda: locate(path, heads))
        wish = Wish(strategy=strategy, local=local, transport=transport)
        plan = plan_of(blueprint.config, blueprint.meta(), dtype, mesh, wish) if plan is None else alone(plan, wish)
        mesh = settled(plan, mesh)
        model = blueprint.build(dtype, mesh.device, 0, mesh)
        return cls(model, mesh, plan=plan)

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
        shared = self._shared(hidden_states, timestep, labels)
        rows, size = len(shared["hidden_states"]), shared["hidden_states"].shape[2:]
        data, cfg = self.mesh.data, self.mesh.cfg
        given = self._repeated(shared, data.size * cfg.size)
        batch = Shard(len(given["hidden_states"]), data.size * cfg.size)
        mine = batch.slice(data.rank * cfg.size + cfg.rank)
        given = {name: value[mine] for name, value in given.items()}
        is_first = self._calls.is_first(tuple((name, x.shape) for name, x in sorted(shared.items())))
        with self.mesh.call(self.mesh.world, "a call of the transformer", is_first):
            out = self._predict(given.pop("hidden_states"), given.pop("timestep"), given)
            parts = [batch.sizes[d * cfg.size : (d + 1) * cfg.size] for d in range(data.size)]
            out = gather(out, cfg, parts[data.rank]) if cfg.size > 1 else out
            out = gather(out, data, tuple(map(sum, parts))) if data.size > 1 else out
        sample = self.model.unpatchify(out[:rows], *size).to(shared["hidden_states"].dtype)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def attend(self, batch: int, tokens: Tokens, user: object | None = None) -> Attend:
        """Return the sharded attention for this batch and split of tokens; it owns its buffers.

        It is kept for later calls until `KINDS` others were used after it. user: an object that needs it as long as it
        exists, as a run whose CUDA graph reads the buffers.
        """
        build, local = load_strategy(self.strategy.name).build, load_local(self.local.name)
        return self._attends.of((batch, tokens), self._moves, lambda own: build(self.mesh, tokens, local, own), user)

    def positions(self, size: tuple[int, ...], split: Split) -> dict[str, Tensor]:
        """Return this rank's rows of each stream's positions for a latent of this size, kept for the last sizes."""
        if (size, split) not in self._positions:
            for oldest in [*self._positions][: max(0, len(self._positions) + 1 - KINDS)]:
                del self._positions[oldest]
            rows = self.model.stream_positions(size, split.lengths)
            self._positions[size, split] = {name: split.mine(name, x, dim=0) for name, x in rows.items()}
        return self._positions[size, split]

    def gathering(self, use: Hashable, axis: Axis, like: Tensor, user: object | None = None) -> Gather:
        """Return the exchange that gathers tensors like this one from all ranks of an axis on each of them.

        Runs share it; all ranks of a replica must ask for it. It is kept as `attend` says, for `GATHERS` others.
        use: must differ on all ranks if the shape differs on one, because ranks free the same exchanges: shares of 9
        and of 10 tokens have one shape on the first of two ranks and two shapes on the second.
        """
        sizes, shape = (1,) * axis.size, tuple(like.shape)
        key = use, axis.name, shape, like.dtype
        return self._gathers.of(key, self._moves, lambda own: own.gather(axis, sizes, shape, like), user)

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; see `seqpar.transports._contract.Transport`."""
        self._moves.check()

    def check_now(self) -> None:
        """Raise TimeoutError if it is known by now that this rank waits for another one in vain."""
        self._moves.check_now()

    def wait(self) -> None:
        """Wait for the device, and raise TimeoutError as soon as it is known that a rank waits in vain."""
        drain(self.mesh.world.watch, self.device, self._moves.late)
        self._moves.check_now()

    def release(self) -> None:
        """Free the buffers of all exchanges, on all ranks at the same time; the next call makes new ones."""
        self._attends.release()
        self._gathers.release()
        self._positions.clear()
        self._releases += 1
        self._moves.release()

    @property
    def releases(self) -> int:
        """Return how often the exchanges were freed, after which graphs that were captured before must not replay."""
        return self._releases

    @property
    def state(self) -> object:
        """Return a key that stays equal while exchanges and weights keep their addresses, so that a graph is valid."""
        return self._releases, self.dtype, tuple(parameter.data_ptr() for parameter in self.parameters())

    def check_size(self, *size: int) -> None:
        """Raise ValueError if a latent cannot be split into patches or has fewer tokens than ranks."""
        self.model.check_size(*size)
        if self.model.STATE[:1] == self.model.STREAMS:
            tokens = prod(side // own for side, own in zip(size, self.model.patch[-len(size) :], strict=True))
            parts = self.mesh.sequence.size
            check_tokens(Shard(tokens, parts), parts)

    def _predict(self, x: Tensor, t_B: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Return the predictions of all tokens for this batch, (B, L, C_out*p*p)."""
        model, axis, size, (name, *others) = self.model, self.mesh.sequence, tuple(x.shape[2:]), self.model.STATE
        if others:
            raise ValueError(
                f"got a call of a model that denoises {', '.join(model.STATE)}, expected one stream; use sample"
            )
        guidance = {"guidance": given.pop("guidance")} if model.EMBEDS_GUIDANCE else {}
        encoded = model.encode(**completed(model, given))
        streams = {name: model.patchify(x), **encoded.streams}
        split = Split.of(model, {key: stream.shape[1] for key, stream in streams.items()}, axis)
        mask = split.mask(encoded)
        conditioning = {**model.modulate(t_B, **encoded.pooled, **guidance), **({} if mask is None else {"mask": mask})}
        mine = {key: split.mine(key, stream) for key, stream in streams.items()}
        attend = self.attend(len(x), split.tokens)
        out = model.forward_tokens(mine, self.positions(size, split), conditioning, attend)[name]
        self.check_delivered()
        return gather(out, axis, split.shard(name).sizes, dim=1) if axis.size > 1 else out

    def _shared(
        self, x: Tensor, timestep: Tensor | float | None, labels: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """Return rank 0's inputs on every rank and check them; arguments of None are left out."""
        tensors, refused = {}, {}
        for name, value in {"hidden_states": x, "timestep": timestep, **labels}.items():
            try:
                tensors |= {} if value is None else {name: torch.as_tensor(value)}
            except (TypeError, ValueError, RuntimeError) as error:  # other ranks may have no error, so all must be told
                refused[f"argument {name}"] = f"{type(value).__name__}, which is no tensor ({error})"
        wants_gradients = isinstance(x, Tensor) and x.requires_grad
        form = {**shapes(tensors), "requires_grad": wants_gradients, **refused, **_unusable(tensors)}
        wrong = self._why_no_prompt(tensors) if self.mesh.is_main else None
        wrong = self.mesh.share(wrong, str | None) if agree(self.mesh, form, vote=wrong is not None) else None
        if refused:
            name, got = next(iter(refused.items()))
            raise ValueError(f"got {name} of type {got}, expected a tensor or a number")
        if wants_gradients:
            raise ValueError(
                "got hidden_states that require gradients, expected none: a sharded model is for inference"
            )
        for reason in (*_unusable(tensors).values(), wrong):
            if reason is not None:
                raise ValueError(reason)
        given = broadcast(self.mesh, tensors)
        self._check_call(given)
        return given

    def _why_no_prompt(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return why the values of a prompt have no meaning, or None; a tensor that was found right is not read again.

        A pipeline passes the same labels at every step, and reading them waits for the device.
        """
        prompt = {name: x for name, x in tensors.items() if name in self.model.PROMPT}
        if set(prompt) != set(self.model.PROMPT) or _unusable(prompt):
            return None  # another check refuses it
        seen = [x() for x, _ in self._right]
        same = len(seen) == len(prompt) and all(x is y for x, y in zip(seen, prompt.values(), strict=True))
        if same and [_version(x) for x in prompt.values()] == [version for _, version in self._right]:
            return None
        try:
            self.model.check_prompt(prompt)
        except ValueError as error:
            return str(error)
        self._right = [(weakref.ref(x), _version(x)) for x in prompt.values()]
        return None

    def _check_call(self, given: Mapping[str, Tensor]) -> None:
        if "hidden_states" not in given:
            raise ValueError(f"got no hidden_states, expected a tensor (B, {self.config.in_channels}, H, W)")
        x, labels = given["hidden_states"], given.keys() - {"hidden_states", "timestep"}
        if x.dim() not in (4, 5) or x.shape[1] != self.config.in_channels:
            raise ValueError(
                f"got hidden_states of shape {tuple(x.shape)}, expected (B, {self.config.in_channels}, H, W)"
            )
        self.check_size(*x.shape[2:])
        wanted = {*self.model.PROMPT, *(["guidance"] if self.model.EMBEDS_GUIDANCE else [])}
        if "timestep" not in given or not wanted - set(self.model.MASKS) <= labels <= wanted:
            names = ", ".join(("timestep", *sorted(wanted)))
            raise ValueError(f"got arguments timestep={'timestep' in given}, {sorted(labels)}, expected {names}")
        for name, value in given.items():
            one = name in SCALARS and value.numel() == 1
            if name in SCALARS and value.dim() > 1:
                raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected () or ({len(x)},)")
            if len(x) == 0 or (value.shape[:1] != x.shape[:1] and not one):
                expected = f"{len(x) or 'some'} rows, one an image"
                raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected {expected}")

    def _repeated(self, given: Mapping[str, Tensor], parts: int) -> dict[str, Tensor]:
        """Move the inputs to this device with one row an image, and repeat rows until there are `parts`."""
        made, rows = {}, len(given["hidden_states"])
        for name, value in given.items():
            whole = value.to(self.device)
            whole = whole.reshape(-1).expand(rows) if name in SCALARS else whole
            made[name] = whole if rows >= parts else torch.cat([whole] * -(-parts // rows))[:parts]
        return made


def _ranks_of(mesh: object) -> Mesh:
    """Return the mesh, or one on which all ranks can learn that it is none; ValueError if only some ranks have one."""
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    if len(set(ranks.collect(mesh is None, bool))) > 1:
        raise ValueError("got a mesh on some ranks and none on others, expected the same mesh on all")
    return ranks


def _check_choices(mesh: object, plan: object, path: object = "", dtype: object = torch.float32) -> None:
    """Refuse a mesh, plan, path or dtype that is none."""
    check_kind("path", path, str, Path, Blueprint, expected="a name, folder or file of a model")
    check_dtype(dtype)
    check_kind("mesh", mesh, Mesh, type(None), expected="a seqpar.Mesh, as of Mesh.from_env(), or None")
    check_kind("plan", plan, Plan, type(None), expected="a seqpar.planner.plan.Plan, or None")


def _version(x: Tensor) -> object:
    """Return what changes when a tensor is written to; a tensor of inference mode does not count writes."""
    return object() if x.is_inference() else x._version


def _unusable(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return why tensors of a call cannot be used, by name."""
    found = {}
    for name, x in tensors.items():
        try:
            (check_floats if name == "hidden_states" else check_dense)(name, x)
            if x.is_complex():
                found[name] = f"got {name} of {x.dtype}, expected real numbers"
        except ValueError as error:
            found[name] = str(error)
    return {f"use of {name}": why for name, why in found.items()}


def settled(plan: Plan, mesh: Mesh | None) -> Mesh:
    """Return the caller's mesh, or that of the plan; `ValueError` on every rank if they do not fit together."""
    found = mesh or Mesh.from_env(*plan.sizes.values())
    found.together(lambda: plan.check(found))
    return found


def plan_of(config: Any, model: nn.Module, dtype: torch.dtype, mesh: Mesh | None, wish: Wish) -> Plan:
    """Return the planner's plan for a model with as many parameters as this one; it is the same on every rank."""
    count = sum(x.numel() for x in model.parameters())
    return for_library(config, count, dtype, mesh, wish, TABLE_BYTES)


def alone(plan: Plan, wish: Wish) -> Plan:
    """Return the caller's plan; `ValueError` if names are given as well, because the plan already decides them."""
    if wish != Wish():
        raise ValueError("got a plan and names of strategy, local or transport, expected one of them: a plan has all")
    return plan
