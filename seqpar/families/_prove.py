"""Compares a tiny random model of a transformer class on several ranks with the same model in one process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import permutations
from multiprocessing.connection import Connection
from typing import Any

import diffusers
import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from seqpar.families._cuts import Cuts
from seqpar.families._find import CUTS, FILES, cuts_of
from seqpar.families._refused import REFUSED
from seqpar.families._tiny import Tiny, arguments, build
from seqpar.mesh.shard import Shard
from seqpar.transformer.parallelize import parallelize, release

RANKS = 3
TOLERANCE = 1e-5  # relative to the largest value: models round to fp32 inside, in which a sum may round differently
LIMIT_S = 300
Outputs = list[tuple[str, list[Tensor]]]
"""Path of a module -> the tensors that it returned, call after call, in the order in which the calls ended."""


@dataclass(frozen=True)
class Proof:
    """The finding of a rank. error: of the results. first: place and path of the first module that differs, or None."""

    error: float
    first: tuple[int, str] | None


def kinds_of(name: str) -> list[str]:
    """Return the transformer classes that a name stands for; ValueError if it is no family and no class."""
    if name in FILES:
        return list(getattr(FILES[name], "CUTS", ()))
    if hasattr(diffusers, name) and runs(name):
        return [name]
    raise ValueError(f"{name} is no family and no transformer with cuts; families: {', '.join(FILES)}")


def transformers() -> list[str]:
    """Return the classes of all of diffusers' transformers."""
    folder = diffusers.models.transformers
    files = [importlib.import_module(f"{folder.__name__}.{one.name}") for one in pkgutil.iter_modules(folder.__path__)]
    own = [kind for file in files for kind in vars(file).values() if getattr(kind, "__module__", "") == file.__name__]
    models = {kind.__name__ for kind in own if isinstance(kind, type) and issubclass(kind, ModelMixin)}
    return sorted(name for name in models if hasattr(diffusers, name))


def runs(kind: str) -> bool:
    """Return whether the tokens of a transformer class are split, by a family's cuts or by its own plan."""
    return kind in CUTS or bool(getattr(getattr(diffusers, kind), "_cp_plan", None))


def standing(kind: str) -> str:
    """Return what becomes of a transformer class: that it runs, or why not."""
    if kind in CUTS:
        return "runs"
    if runs(kind):
        return "runs by its own plan"
    return f"not split: {REFUSED[kind]}" if kind in REFUSED else "no cuts are known; pass them as cuts="


def tiny_of(kind: str) -> Tiny:
    return next((file.TINY[kind] for file in FILES.values() if kind in getattr(file, "TINY", ())), Tiny())


def compare(kind: str, native: bool, cuts: Cuts | None = None) -> Proof:
    """Compare the call of a tiny model on all ranks with the same call in this process. Collective.

    native: whether the family's functions compute blocks. cuts: in place of the family's. Raises ValueError if a call
    with `return_dict=True` returns another class than diffusers does, TypeError if `Cuts.output` takes fewer results.
    """
    tiny = tiny_of(kind)
    module = build(getattr(diffusers, kind), tiny)
    given = arguments(module, tiny)
    with recorded(module) as whole, torch.no_grad():
        results = module(**given, return_dict=False)
    with torch.no_grad():
        expected = module(**given, return_dict=True)
    parallelize(module, cuts=cuts, native=native, cfg=False)
    with recorded(module) as parts, torch.no_grad():
        ours = module(**given, return_dict=False)
    with torch.no_grad():
        named = module(**given, return_dict=True)
    call: Any = module.forward
    state = call.state
    lengths, rank, size = dict(state.lengths), state.axis.rank, state.axis.size
    release(module)
    if not isinstance(expected, type(named)):
        names = type(named).__name__, type(expected).__name__
        raise ValueError(f"got results in {names[0]}, expected {names[1]}; set output= of its Cuts")
    pairs = ((results, ours), (expected.to_tuple(), named.to_tuple()))
    errors = [_error(x, y) for both in pairs for x, y in zip(*map(_tensors, both), strict=True)]
    return Proof(max(errors), _first_difference(whole, parts, lengths, rank, size))


@contextmanager
def recorded(module: nn.Module) -> Iterator[Outputs]:
    """Record what the submodules of a module return."""
    outputs: Outputs = []
    paths = {id(child): path for path, child in module.named_modules() if path}

    def record(child: nn.Module, inputs: Any, output: Any) -> None:
        if id(child) in paths:
            outputs.append((paths[id(child)], [x.detach().clone() for x in _tensors(output)]))

    handle = register_module_forward_hook(record)
    try:
        yield outputs
    finally:
        handle.remove()


def _first_difference(
    whole: Outputs, parts: Outputs, lengths: Mapping[str, int], rank: int, size: int
) -> tuple[int, str] | None:
    # place and path of the first module whose output is not this rank's part of the whole one
    by_path: dict[str, list[list[Tensor]]] = {}
    for path, tensors in parts:
        by_path.setdefault(path, []).append(tensors)
    for place, (path, tensors) in enumerate(whole):
        if not by_path.get(path):
            continue  # a function computes it inside of its block
        for x, part in zip(tensors, by_path[path].pop(0), strict=False):
            candidates = [each for each in _parts(x, part, lengths, rank, size) if each.shape == part.shape]
            if candidates and min(_error(each, part) for each in candidates) > TOLERANCE:
                return place, path
    return None


def _parts(whole: Tensor, part: Tensor, lengths: Mapping[str, int], rank: int, size: int) -> Iterator[Tensor]:
    # what a rank may have of a tensor: all of it, or its share of one stream, or of several in some order
    yield whole
    if whole.dim() != part.dim():
        return
    for dim, (total, mine) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if total == mine:
            continue
        for count in range(1, len(lengths) + 1):
            for streams in permutations(lengths.values(), count):
                if sum(streams) == total:
                    rows = [Shard(length, size).slice(rank) for length in streams]
                    split = zip(whole.split(list(streams), dim), rows, strict=True)
                    yield torch.cat([x.narrow(dim, own.start, own.stop - own.start) for x, own in split], dim)


def _tensors(value: Any) -> list[Tensor]:
    # floating and complex ones, also in nested tuples and lists
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    return [x for each in value for x in _tensors(each)] if isinstance(value, (tuple, list)) else []


def _error(x: Tensor, y: Tensor) -> float:
    # the largest difference relative to the largest value; infinite for NaN
    if not x.numel():
        return 0.0
    error = ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


# Ranks ---------------------------------------------------------------------------------------------------------


def _on_rank(rank: int, port: int, kinds: Sequence[str], answers: Connection) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= where | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # models in fp64 are unusual
    for kind in kinds:
        try:
            with redirect_stdout(StringIO()):
                answers.send([compare(kind, native) for native in ways(kind)])
        except (ValueError, RuntimeError, TypeError) as error:  # what wrong cuts lead to
            answers.send(f"{type(error).__name__}: {error}")


def ways(kind: str) -> list[bool]:
    """Return whether functions compute blocks, in each run."""
    file = next((file for file in FILES.values() if kind in getattr(file, "CUTS", ())), None)
    return [False, True] if hasattr(file, "BLOCKS") else [False]


def proofs(kinds: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each class, and why the ranks do not compute what one process does, or None."""
    reasons = dict[str, str | None]()
    for kind in kinds:
        with torch.device("meta"):
            module = getattr(diffusers, kind)(**tiny_of(kind).config)
        reasons[kind] = cuts_of(module).why_not(module)
    splits = [kind for kind, reason in reasons.items() if reason is None]
    yield from ((kind, f"runs on one rank alone: {reason}") for kind, reason in reasons.items() if reason)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context, ranks = multiprocessing.get_context("spawn"), list[Any]()
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        ranks.append((context.Process(target=_on_rank, args=(rank, port, splits, theirs), daemon=True), ours))
        ranks[-1][0].start()
        theirs.close()
    for kind in splits:
        answers = list[Any]()
        for _, ours in ranks:
            with suppress(EOFError):  # it has crashed, and its traceback is printed
                answers += [ours.recv()] if ours.poll(LIMIT_S) else []
        if len(answers) < RANKS:
            yield kind, "a rank has crashed or hangs"
            break
        yield kind, _reason(kind, answers)
    for process, _ in ranks:
        process.terminate()
        process.join()


def _reason(kind: str, answers: Sequence[Any]) -> str | None:
    if messages := [answer for answer in answers if isinstance(answer, str)]:
        return messages[0]
    for native, reports in zip(ways(kind), zip(*answers, strict=True), strict=True):
        if (text := verdict(reports)) is not None:
            return f"{text}, with the blocks of {'the family' if native else 'diffusers'}"
    return None


def verdict(reports: Sequence[Proof]) -> str | None:
    """Return what differs by the reports of all ranks, or None."""
    if max(report.error for report in reports) <= TOLERANCE:
        return None
    first = min((report.first for report in reports if report.first is not None), default=None)
    where = "the transformer's own result" if first is None else first[1]
    return f"differs by {max(report.error for report in reports):.1e}; the first module that differs: {where}"
