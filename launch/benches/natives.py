"""Rows of `launch/benches/calls.py` for our own models: a step of our own loop, and a pipeline's call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from launch.benches.calls import Case, Row, Timed
from launch.benches.timing import elapsed, graphed
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.protocols import Condition, SequenceModel, rows
from seqpar.streams import Split

TABLE = 28  # steps of the modulation table
TIMESTEP, GUIDANCE = 500.0, 3.5


@dataclass(frozen=True)
class How:
    """How a row computes a call. inside: whether it computes the modulation, instead of taking it from a table.

    ranks: makes the mesh; a cfg axis of two ranks computes both branches of true guidance.
    """

    strategy: str
    transport: str
    inside: bool
    ranks: Callable[[], Mesh]


def natives(case: Case, strategies: Sequence[str], transport: str) -> Iterator[Row]:
    """Yield the rows of our own model, if there is one: each strategy with modulation from a table, and in the call.

    On an even number of ranks there are rows of both branches of true guidance, each on half of the ranks.
    """
    if case.model.native is None:
        return
    world = case.mesh.world.size
    branches = cache(partial(Mesh.from_env, cfg=2, ulysses=world // 2, device=case.mesh.device))
    for cfg, ranks in ((1, lambda: case.mesh), *([(2, branches)] if world % 2 == 0 else [])):
        for strategy in strategies if world > cfg else strategies[:1]:
            for inside in (False, True):
                what = "call with modulation" if inside else "step, modulation from a table"
                how = [strategy] if world > cfg else []  # a sequence of one rank exchanges nothing
                name = ", ".join(["native", *(["both branches on a cfg axis"] if cfg == 2 else []), *how, what])
                ready = partial(_native, case, How(strategy, transport, inside, ranks))
                about = {"modulation": inside, "cfg": cfg} | ({"strategy": strategy} if world > cfg else {})
                yield Row("ours", name, strategy, ready, about, branches=cfg)


@contextmanager
def _native(case: Case, how: How) -> Iterator[Timed]:
    mesh = how.ranks()
    alone = mesh.sequence.size * mesh.cfg.size == 1
    dit = DistributedDiT(case.ours, mesh, how.strategy, case.local, "auto" if alone else how.transport)
    made: dict[str, Tensor] = {}
    prediction = torch.no_grad()(_prediction(dit, case, how.inside))

    def step() -> None:
        made["out"] = _guided(dit, prediction())

    def facts() -> dict[str, Any]:
        told: dict[str, Any] = {"transport": dit.transport.name, "local": dit.local.name}
        told |= {} if how.inside else {"table_ms_a_step": _table_ms(dit.model, case)}
        return told | ({} if alone else {"error": _error(case, dit, made["out"], how.inside)})

    try:
        step()
        dit.check_delivered()
        yield Timed(graphed(step) if mesh.device.type == "cuda" else step, dit.check_delivered, facts)
    finally:
        dit.release()


def _guided(dit: DistributedDiT, out_BlC: Tensor) -> Tensor:
    """Return the guided prediction of both branches, which the ranks of the cfg axis exchange, if there is one."""
    if dit.mesh.cfg.size == 1:
        return out_BlC
    cond, uncond = dit.keeper.gathered("branches", dit.mesh.cfg, out_BlC[None])
    return torch.lerp(uncond, cond, GUIDANCE)


@torch.no_grad()
def _table_ms(model: SequenceModel, case: Case) -> float:
    """Return the ms that the modulation's table takes, shared out over its steps."""
    given = Given.of(model, case)
    encoded = model.encode(**given.prompt)
    return elapsed(lambda: _table(model, given, encoded.pooled), 3, case.mesh.device) / TABLE


def _table(model: SequenceModel, given: Given, pooled: Mapping[str, Tensor]) -> Condition:
    """Return the modulation of a run's steps."""
    every = {name: x.repeat(TABLE, *[1] * (x.dim() - 1)) for name, x in {**pooled, **given.guidance}.items()}
    return model.modulate(given.t_R.repeat(TABLE), **every)


@dataclass(frozen=True)
class Given:
    """The inputs of a call, the same on every rank: the state's tokens, the prompt, the timestep and guidance scale."""

    tokens_BLC: Tensor
    prompt: dict[str, Tensor]
    t_R: Tensor
    guidance: dict[str, Tensor]

    @staticmethod
    def of(model: SequenceModel, case: Case) -> Given:
        """Return random inputs."""
        device, config, drawn = case.mesh.device, model.config, torch.Generator().manual_seed(0)
        noise = torch.randn(1, config.in_channels, *_size(case), generator=drawn).to(device)
        text = torch.randn(1, case.model.text, config.joint_attention_dim, generator=drawn).to(device, case.dtype)
        pooled = torch.randn(1, config.pooled_projection_dim, generator=drawn).to(device, case.dtype)
        prompt = dict(zip(model.PROMPT, (text, pooled), strict=True))
        guidance = {"guidance": torch.tensor([GUIDANCE], device=device)} if model.EMBEDS_GUIDANCE else {}
        return Given(model.patchify(noise), prompt, torch.tensor([TIMESTEP], device=device), guidance)


def _size(case: Case) -> tuple[int, ...]:
    """Return rows and columns of the latent."""
    return tuple(side * case.ours.config.patch_size for side in case.model.size)


def _prediction(dit: DistributedDiT, case: Case, inside: bool) -> Callable[[], Tensor]:
    """Return a function that predicts this rank's tokens, with modulation from a table or computed inside.

    With `inside` the text is projected in the call, too, as in a pipeline.
    """
    model, given = dit.model, Given.of(dit.model, case)
    encoded = model.encode(**given.prompt)
    streams = {"image": given.tokens_BLC, **encoded.streams}
    split = Split.of(model, {name: x.shape[1] for name, x in streams.items()}, dit.mesh.sequence)
    mine = {name: split.mine(name, x).contiguous() for name, x in streams.items()}
    positions, attend = dit.positions(_size(case), split), dit.keeper.attend(1, split.tokens)
    modulations = _table(model, given, encoded.pooled)
    place = torch.full((1,), TABLE // 2, device=given.t_R.device)

    def from_table() -> Tensor:
        return model.forward_tokens(mine, positions, rows(modulations, place), attend)["image"]

    def in_a_call() -> Tensor:
        now = model.encode(**given.prompt)
        texts = {name: split.mine(name, x) for name, x in now.streams.items()}
        conditioning = _modulated(model, given, now.pooled)
        return model.forward_tokens({**mine, **texts}, positions, conditioning, attend)["image"]

    return in_a_call if inside else from_table


def _modulated(model: Any, given: Given, pooled: Any) -> Any:
    """Return the modulation as a pipeline's call of the transformer computes it."""
    if hasattr(model, "modulate_call"):
        return model.modulate_call(given.t_R / 1000, given.guidance.get("guidance"), *pooled.values())
    return model.modulate(given.t_R, **pooled, **given.guidance)


def _error(case: Case, dit: DistributedDiT, out: Tensor, inside: bool) -> float:
    """Return the largest relative error of any rank's tokens against the whole call on one rank."""
    alone = DistributedDiT(case.ours, Mesh.single(case.mesh.device), local=dit.local.name)
    with torch.no_grad():
        whole = _prediction(alone, case, inside)()
    shard = Split.of(dit.model, {"image": whole.shape[1], "text": case.model.text}, dit.mesh.sequence)
    mine = shard.mine("image", whole)
    error = float((out.double() - mine.double()).norm() / whole.double().norm())
    alone.release()
    return max(case.mesh.collect(error, float))
