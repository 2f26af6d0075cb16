"""`DistributedDiT`: a diffusion transformer on a mesh, called like the diffusers model.

It shards the inputs, runs the model on this rank's tokens with a sharded `attend`, and gathers the outputs. A diffusers
pipeline runs sharded after `pipe.transformer = DistributedDiT(pipe.transformer, mesh)`; our own loop
(`seqpar.loop.loop`) is faster, because it gathers once at the end instead of once per step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar._moved import successors
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.loop import eight
from seqpar.loop.blueprint import Blueprint, from_diffusers, locate
from seqpar.loop.interface import Encoded, SequenceModel, Split, checked_prompt
from seqpar.mesh.inputs import agree, broadcast, shapes
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard, check_tokens
from seqpar.mesh.watch import Calls
from seqpar.planner.plan import Plan, check_names, for_library, named_mesh, settled
from seqpar.planner.predict import TABLE_BYTES
from seqpar.planner.search import Preferences
from seqpar.transformer.calibration import Precision, check_precision
from seqpar.transports.collective import gather
from seqpar.types.arguments import check_dense, check_dtype, check_floats, check_kind, is_not_finite
from seqpar.types.protocols import Attend

SCALARS = ("timestep", "guidance")  # inputs that may be one number for all images
SIZES = 8  # cached tables of positions: new sizes must not fill the memory


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


class DistributedDiT(nn.Module):
    """A sequence-parallel diffusion transformer.

    model: a `seqpar` model, a diffusers transformer, whose weights are used unchanged, or a `Blueprint`, loaded in
    `dtype` (default fp32). mesh, strategy, local, transport: the caller's choices; the planner decides once on those
    that are None or "auto", for one guided image of the model's own size. mesh may be what `--mesh` takes, as
    "cfg=2,ulysses=2". plan: a plan that was made before (`seqpar.planner.plan`), in place of names.
    precision: "fp8" computes the GEMMs of the blocks in 8 bits, with an error (docs/precision.md); the first time for
    some weights, it calibrates them by a short run. None keeps the weights' dtype.
    The attributes `plan`, `strategy`, `local` and `transport` hold the choices and their reasons.
    Raises ValueError if model, mesh, names, plan and precision do not fit together.
    """

    def __init__(
        self,
        model: nn.Module | Blueprint,
        mesh: Mesh | str | None = None,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
        dtype: torch.dtype | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()

        # 1. the same valid names on every rank
        names = Preferences(strategy=strategy, local=local, transport=transport)

        def checked() -> tuple[Mesh | None, Preferences]:
            if dtype is not None:
                check_dtype(dtype)
                if isinstance(model, SequenceModel):
                    raise ValueError(
                        f"got dtype={dtype} for a {type(model).__name__} with weights; use model.to(dtype)"
                    )
            return _checked(mesh, names, plan, precision)

        ranks = _ranks_of(mesh, plan)
        own, preferences = ranks.on_all_ranks(checked)
        agree(ranks, {"precision": precision})

        # 2. the plan and its mesh
        unloaded = isinstance(model, Blueprint)
        module = model.meta() if isinstance(model, Blueprint) else model
        blueprint = model if isinstance(model, Blueprint) else None
        if not isinstance(module, SequenceModel):
            blueprint = from_diffusers(module)
        config: Any = module.config if blueprint is None else blueprint.config
        dtype = dtype or next(module.parameters()).dtype
        if precision is not None:
            reason = eight.why_not(module if blueprint is None else blueprint.meta(), ranks.device, dtype)
            if reason is not None:
                raise ValueError(f'precision="{precision}" cannot be used: {reason}')
        if plan is None:
            count = sum(x.numel() for x in module.parameters())
            plan = for_library(config, count, dtype, own, preferences, TABLE_BYTES, precision is not None)
        self.mesh = settled(plan, own)

        # 3. the weights; of a file each rank reads a share
        if blueprint is not None:
            module = blueprint.build(dtype, self.mesh.device, 0, self.mesh if unloaded else None)
        assert isinstance(module, SequenceModel)
        self.model, self.plan = module.to(self.mesh.device), plan
        self.strategy, self.local, self.transport = plan.strategy, plan.local, plan.transport
        self.keeper, self._calls = ExchangeCache(self.mesh, plan), Calls()
        self._checked_prompt: list[tuple[weakref.ref[Tensor], object]] = []  # the last one, with its versions
        self._positions: dict[tuple[tuple[int, ...], Split], dict[str, Tensor]] = {}

        # 4. matrices in 8 bits
        self.matrices8: eight.Matrices8 | None = None
        if precision is not None:

            def alone() -> DistributedDiT:
                return DistributedDiT(self.model, Mesh.single(self.device), local=self.local.name)

            self.matrices8 = eight.Matrices8(self.model, eight.calibrated(self.model, self.mesh, alone))

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
        precision: Precision | None = None,
    ) -> DistributedDiT:
        """Load a diffusers folder (pipeline or transformer), a hub id or a random model.

        The other arguments are those of the class. Raises the same ValueError on every rank, before any weights are
        loaded, if something does not fit.
        """

        def located() -> Blueprint:  # which may download, so that all other arguments are checked before
            check_kind("path", path, str, Path, Blueprint, expected="a name, folder or file of a model")
            check_dtype(dtype)
            _checked(mesh, Preferences(strategy=strategy, local=local, transport=transport), plan, precision)
            return locate(path)

        blueprint = _ranks_of(mesh, plan).on_all_ranks(located)
        return cls(blueprint, mesh, strategy, local, transport, plan=plan, dtype=dtype, precision=precision)

    @property
    def config(self) -> Any:
        """It has sample_size, patch_size, in_channels and out_channels, as in diffusers."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
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
        # 1. rank 0's inputs, with one row per image and at least one row per rank of the data and cfg axes
        shared = self.inputs_of_rank_0({"hidden_states": hidden_states, "timestep": timestep, **labels})
        (rows, _, *size), data, cfg = shared["hidden_states"].shape, self.mesh.data, self.mesh.cfg
        self.check_size(*size)
        self.follow_weights()
        model, axis, (name, *others) = self.model, self.mesh.sequence, self.model.STATE
        if others:
            raise ValueError(
                f"got a call of a model that denoises {', '.join(model.STATE)}, expected a single stream; use sample"
            )
        parts, inputs = data.size * cfg.size, {key: x.to(self.device) for key, x in shared.items()}
        inputs |= {key: inputs[key].reshape(-1).expand(rows) for key in SCALARS if key in inputs}
        if rows < parts:
            inputs = {key: torch.cat([x] * -(-parts // rows))[:parts] for key, x in inputs.items()}
        batch = Shard(len(inputs["hidden_states"]), parts)
        local = batch.slice(data.rank * cfg.size + cfg.rank)
        inputs = {key: x[local] for key, x in inputs.items()}

        # 2. the prediction of this rank's rows and tokens, gathered
        is_first = self._calls.is_first(tuple((key, x.shape) for key, x in sorted(shared.items())))
        with self.mesh.call(self.mesh.world, "a call of the transformer", is_first):
            x, t_B = inputs.pop("hidden_states"), inputs.pop("timestep")
            encoded, tokens = model.encode(**checked_prompt(model, inputs)), model.patchify(x)
            share = self.share(encoded, {name: tokens.shape[1]}, tuple(size), len(x))
            mine = share.split.mine(name, tokens).contiguous()  # with gaps, a linear layer adds its bias in another way
            streams = {**share.constant, name: mine}
            conditioning = model.modulate(t_B, **encoded.pooled)
            with self.computing():
                out = model.forward_tokens(streams, share.positions, conditioning, share.attend)[name]
            self.check_delivered()
            out = gather(out, axis, share.split.shard(name).sizes, dim=1) if axis.size > 1 else out
            sizes = [batch.sizes[d * cfg.size : (d + 1) * cfg.size] for d in range(data.size)]
            out = gather(out, cfg, sizes[data.rank]) if cfg.size > 1 else out
            out = gather(out, data, tuple(map(sum, sizes))) if data.size > 1 else out
        sample = model.unpatchify(out[:rows], *size).to(shared["hidden_states"].dtype)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def inputs_of_rank_0(self, inputs: Mapping[str, Tensor | float | None]) -> dict[str, Tensor]:
        """Rank 0's inputs of a call on every rank, without arguments that are None. Collective: call on all ranks.

        Raises the same ValueError on every rank for inputs that the model does not take.
        """
        tensors, refused = {}, {}
        for name, value in inputs.items():
            try:
                tensors |= {} if value is None else {name: _usable(name, value)}
            except ValueError as error:  # other ranks may have no error
                refused[f"use of {name}"] = str(error)

        # compare the ranks; rank 0, whose values count, checks the prompt
        form = {**shapes(tensors), **refused}
        wrong = self._why_no_prompt(tensors) if self.mesh.is_main else None
        wrong = self.mesh.share(wrong, str | None) if agree(self.mesh, form, vote=wrong is not None) else None
        for reason in (*refused.values(), wrong):
            if reason is not None:
                raise ValueError(reason)
        shared = broadcast(self.mesh, tensors)

        # names and shapes
        channels, labels = self.model.config.in_channels, shared.keys() - {"hidden_states", "timestep"}
        if "hidden_states" not in shared:
            raise ValueError(f"got no hidden_states, expected a tensor (B, {channels}, H, W)")
        x = shared["hidden_states"]
        if x.dim() not in (4, 5) or x.shape[1] != channels:
            raise ValueError(f"got hidden_states of shape {tuple(x.shape)}, expected (B, {channels}, H, W)")
        if "timestep" not in shared or labels != {*self.model.PROMPT}:
            names = ", ".join(("timestep", *sorted(self.model.PROMPT)))
            raise ValueError(f"got arguments timestep={'timestep' in shared}, {sorted(labels)}, expected {names}")
        for name, value in shared.items():
            one = name in SCALARS and value.numel() == 1
            if name in SCALARS and value.dim() > 1:
                raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected () or ({len(x)},)")
            if len(x) == 0 or (value.shape[:1] != x.shape[:1] and not one):
                expected = f"{len(x) or 'some'} rows, one per image"
                raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected {expected}")
        return shared

    def _why_no_prompt(self, tensors: Mapping[str, Tensor]) -> str | None:
        # A pipeline passes the same labels at every step, and reading them waits for the device, so unchanged tensors
        # are checked once.
        prompt = {name: x for name, x in tensors.items() if name in self.model.PROMPT}
        if set(prompt) != set(self.model.PROMPT):
            return None  # another check raises
        last = [x() for x, _ in self._checked_prompt]
        same = len(last) == len(prompt) and all(x is y for x, y in zip(last, prompt.values(), strict=True))
        if same and [_version(x) for x in prompt.values()] == [version for _, version in self._checked_prompt]:
            return None
        try:
            self.model.check_prompt(prompt)
        except ValueError as error:
            return str(error)
        self._checked_prompt = [(weakref.ref(x), _version(x)) for x in prompt.values()]
        return None

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

    def computing(self) -> AbstractContextManager[None]:
        """A context in which the model computes in this one's precision; others may use the same model."""
        return nullcontext() if self.matrices8 is None else eight.computing(self.model, self.matrices8.by_path)

    def follow_weights(self) -> None:
        """Round weights again that were written in place; what was written through `.data` needs `refresh`."""
        if self.matrices8 is not None:
            self.matrices8.follow()

    def refresh(self) -> None:
        """Round all weights to 8 bits again, if the model computes in 8 bits."""
        if self.matrices8 is not None:
            self.matrices8.refresh()

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


def _ranks_of(mesh: object, plan: object) -> Mesh:
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    given = ranks.collect((mesh is None, plan is None), tuple[bool, bool])
    for name, have in zip(("mesh", "plan"), zip(*given, strict=True), strict=True):
        if len(set(have)) > 1:
            raise ValueError(f"got a {name} on some ranks and none on others, expected the same {name} on all")
    return ranks


def _version(x: Tensor) -> object:
    # changes when a tensor is written to; inference tensors do not count writes
    return object() if x.is_inference() else x._version


def _usable(name: str, value: Tensor | float) -> Tensor:
    """Return an input as a tensor; ValueError if no model can compute with it."""
    try:
        x = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(value).__name__}, which is no tensor ({error})"
        raise ValueError(f"got argument {name} of type {got}, expected a tensor or a number") from error
    (check_floats if name == "hidden_states" else check_dense)(name, x)
    if x.is_complex():
        raise ValueError(f"got {name} of {x.dtype}, expected real numbers")
    if name in SCALARS and (x.dtype == torch.bool or is_not_finite(x)):
        raise ValueError(f"got {name} {x.tolist()}, expected finite numbers")
    if name == "hidden_states" and x.requires_grad:
        raise ValueError("hidden_states requires grad, but a sharded model supports inference only; detach it")
    return x


def _checked(
    mesh: Mesh | str | None, names: Preferences, plan: object, precision: object
) -> tuple[Mesh | None, Preferences]:
    check_precision(precision)
    check_kind("plan", plan, Plan, type(None), expected="a seqpar.planner.plan.Plan, or None")
    check_names(names.strategy, names.local, names.transport)
    own, preferences = named_mesh(mesh, names)
    if plan is not None and preferences != Preferences():
        raise ValueError("a plan contains mesh, strategy, local and transport; pass either the plan or these names")
    return own, preferences
