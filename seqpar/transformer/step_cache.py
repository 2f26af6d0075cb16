"""`StepCaching`: leaves out most blocks of a step whose first blocks change the latents little, and reuses residuals.

A step of a transformer with a step cache has four parts:

    head    the first blocks are computed. How much they change the latents is compared with the last computed step.
    rest    if that differs much: the other blocks are computed, and what they add (their residual) is kept.
    reuse   otherwise: kept residuals are added, or extrapolated to this step.
    tail    the last blocks and the output layers are computed.

Each part is a separate CUDA graph. Between head and rest the host reads 40 bytes and decides. All ranks read the same
sums, in fixed point over all tokens, so that every split of the tokens decides alike (`kernels/step_cache.py`).
The first branch of guidance decides for the others; each branch keeps its residuals.
State of an earlier run is never reused: `reset` starts a run, and without it a text that changed, or a timestep that
does not continue the last ones, does.
Source: the idea of DBCache (cache-dit) and FirstBlockCache (ParaAttention); TaylorSeer, arXiv 2503.06923.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn

from seqpar.families._cuts import StepBlocks, parameters, submodules
from seqpar.families._find import steps_of
from seqpar.graphs.graphs import Recording
from seqpar.graphs.signature import Form
from seqpar.kernels.step_cache import RESIDUALS, add_change, extrapolate
from seqpar.mesh.mesh import Axis
from seqpar.transformer.blocks import FusedBlocks
from seqpar.transformer.forward import CallState
from seqpar.transformer.lora import bits
from seqpar.types.arguments import check_kind

KEPT = 16  # branches of a size that keep buffers; a size has one to three
BRANCHES = 8  # of guidance, each with its text; more are computed whole
NAMES: Mapping[str, Mapping[str, int]] = {"dbcache": {"order": 0}, "taylorseer": {"order": 1}}


@dataclass(frozen=True)
class StepCache:
    """Which steps are computed.

    threshold: the change of the first blocks' residual, relative to its size, up to which a step reuses the others'.
    head: the number of first blocks that every step computes. None: the family's own for both. back: of last blocks.
    warmup: the first steps of each transformer that are computed. most: the most steps in a row that are not computed.
    order: residuals are those of the last computed step (0), or extrapolated from 2 or 3 computed steps (1, 2).
    mask: "1" for each step that is computed and "0" for each other one, in place of the change; it repeats ("10"
    computes every second step). Raises ValueError for a number that no cache can have.
    """

    threshold: float | None = None
    head: int | None = None
    back: int = 0
    warmup: int = 4
    most: int = 3
    order: int = 0
    mask: str = ""

    def __post_init__(self) -> None:
        for name, least in (("head", 1), ("back", 0), ("warmup", 1), ("most", 1), ("order", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"got {name} {value!r} of a step cache, expected {least} or more")
        if self.order >= RESIDUALS:
            raise ValueError(f"got order {self.order} of a step cache, expected 0, 1 or 2")
        if self.threshold is not None and not (0 <= float(self.threshold) < float("inf")):
            raise ValueError(f"got threshold {self.threshold} of a step cache, expected 0 or more")
        if set(self.mask) - {"0", "1"}:
            raise ValueError(f"got mask {self.mask!r} of a step cache, expected 1 (computed) and 0 for each step")

    @staticmethod
    def of(text: str) -> StepCache:
        """Return the cache that a text names: "dbcache", or "taylorseer:threshold=0.2,head=2"."""
        name, _, options = text.partition(":")
        if name not in NAMES:
            raise ValueError(f"got step cache {name!r}, expected {' or '.join(NAMES)}, as in dbcache:threshold=0.1")
        kinds: dict[str, Callable[[str], Any]] = {x.name: int for x in fields(StepCache)}
        kinds |= {"threshold": float, "mask": str}
        given: dict[str, Any] = dict(NAMES[name])
        for option in options.split(",") if options else ():
            key, _, value = option.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError):
                known = ", ".join(kinds)
                raise ValueError(
                    f"got {option!r} for a step cache, expected NAME=NUMBER with a name of {known}"
                ) from None
        return StepCache(**given)

    def __str__(self) -> str:
        name = "taylorseer" if self.order else "dbcache"
        defaults: dict[str, Any] = {x.name: x.default for x in fields(self)} | dict(NAMES[name])
        options = ",".join(f"{key}={getattr(self, key)}" for key, x in defaults.items() if getattr(self, key) != x)
        return f"{name}:{options}" if options else name


@dataclass(frozen=True)
class CachedStep:
    """A step of a run: whether it was computed, and the change of its first blocks (None in the first step)."""

    computed: bool
    change: float | None


@dataclass(eq=False)
class _Branch:
    """Buffers of one kind of call of one branch, and which steps they hold. `computed`: step numbers, newest first.

    home: the half of a cfg axis whose buffers hold what the branch needs, None for both; all ranks know of which steps.
    """

    number: int
    ordinal: int
    seen: Tensor  # bits of the text, added up
    sums: Tensor
    host: Tensor  # what the decision reads
    weights: Tensor  # of the residuals, on the host, from where the reuse takes them
    weights_J: Tensor
    home: int | None = None
    before_BlE: Tensor | None = None
    present: list[bool] = field(default_factory=list[bool])  # which outputs of the last block are no None
    residuals: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    computed: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])  # the first and the last timestep

    def restart(self) -> None:
        self.computed.clear()
        self.times.clear()

    def continues(self, time: float, rounds: bool) -> bool:
        """Return whether a timestep goes on in the direction of those before. rounds: see `StepCaching`."""
        first, last = self.times[0], self.times[-1]
        return (rounds or time != last) and (last - first) * (time - last) >= 0


def step_cache(value: StepCache | str | None) -> StepCache | None:
    """Return the step cache of an argument `cache=`; ValueError for another value."""
    check_kind("cache", value, StepCache, str, type(None), expected="the name of a step cache, or seqpar.StepCache")
    return StepCache.of(value) if isinstance(value, str) else value


def completed(options: StepCache, module: nn.Module) -> tuple[StepCache, StepBlocks]:
    """Return options with the family's defaults, and its blocks; ValueError for a transformer without a step cache."""
    of, name = steps_of(module), type(module).__name__
    if of is None:
        raise ValueError(f"{name} has no step cache: what its blocks pass on to each other is not known")
    head, threshold = options.head or of.head, of.threshold if options.threshold is None else options.threshold
    options = replace(options, head=head, threshold=threshold)
    _blocks(options, of, module)
    return options, of


def check_blocks_for(options: StepCache | None, modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if one of the transformers cannot have this step cache."""
    if options is not None:
        for module in modules:
            completed(options, module)


def _blocks(options: StepCache, of: StepBlocks, module: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    blocks = [(part, names) for path, names in of.lists.items() for part in submodules(module, f"{path}.*?")]
    head = options.head or of.head
    if head + options.back >= len(blocks):
        raise ValueError(
            f"got a step cache that computes {head} blocks at the head and {options.back} at the back in every step, "
            f"which leaves none of the {len(blocks)} blocks of {type(module).__name__}; use fewer"
        )
    if blocks[head][1] != blocks[0][1]:
        raise ValueError(f"got head={head} of a step cache, expected fewer: the first blocks must be of one kind")
    return blocks


class StepCaching:
    """The step cache of one transformer. recording: what captures its calls as CUDA graphs now, if anything does.

    Raises ValueError where the transformer has too few blocks, or blocks that are not known.
    """

    def __init__(self, options: StepCache, module: nn.Module, state: CallState) -> None:
        self.options, of = completed(options, module)
        self._of, self._state = of, state
        self.recording: Callable[[], Recording | None] = lambda: None
        self.on, self.log = True, list[CachedStep]()  # of the steps of the run
        self.counted = [0, 0]  # how many steps of all runs were computed, and of how many
        self._branches = OrderedDict[tuple[Hashable, int], _Branch]()
        self._made = 0  # how many branches have had buffers
        self._ordinals = dict[Hashable, int]()
        self._now: _Branch | None = None
        self._beside = list[_Branch]()  # that branch, and the one that the other half of a cfg axis computes, in order
        self.home: int | None = None  # the half of a cfg axis whose results are those of the call; None: of both
        self._decided: bool | None = None  # whether this call computes; None before it is decided
        self._skips = False
        # whether timesteps have 16 bits, in which neighbours may be one number; of all branches, because a graph of one
        # is replayed beside others, of which this rank then sees no call
        self._rounds = False
        self._run: _Run | None = None

    # Between calls ------------------------------------------------------------------------------------------------

    def hooks(self, module: nn.Module) -> Mapping[nn.Module, StepHook]:
        """Return the hooks of all blocks of the module as it is now; ValueError if there are too few."""
        blocks, parts = _blocks(self.options, self._of, module), [*self.parts(module).values()]
        first, last = parts.index(1), len(parts) - 1 - parts[::-1].index(1)
        return {
            part: StepHook(self, names, index == 0, index == first, first <= index <= last, index == last)
            for index, (part, names) in enumerate(blocks)
        }

    def parts(self, module: nn.Module) -> Mapping[nn.Module, int]:
        """Return the part of each block: 0 head, 1 rest, 2 tail."""
        blocks, head = _blocks(self.options, self._of, module), self.options.head or 0
        last = len(blocks) - 1 - self.options.back
        return {part: (index >= head) + (index > last) for index, (part, _) in enumerate(blocks)}

    def reset(self) -> None:
        """Start a run: nothing of earlier calls is reused."""
        self.forget()
        self._ordinals.clear()
        self.log = []

    def forget(self) -> None:
        """Compute the next step of each branch, because weights changed in a run."""
        for branch in self._branches.values():
            branch.restart()

    def ordinal(self, label: str | None, text: Tensor | None) -> int:
        """Return which branch of guidance a call is, by the name that its pipeline gives it, or by its text's memory.

        A text in the memory of another one has the buffers of that branch, but other bits, and is computed.
        """
        key = label if label is not None else None if text is None else (text.data_ptr(), tuple(text.shape))
        return self._ordinals.setdefault(key, min(len(self._ordinals), BRANCHES - 1))

    def text_of(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return the text of a call, which differs between branches."""
        text = arguments.get(self._of.text)
        text = text[0] if isinstance(text, (list, tuple)) and text else text
        return text if isinstance(text, Tensor) else None

    def enter(self, calls: Sequence[tuple[Hashable, int]], split: bool = False) -> Hashable:
        """Return the mark of the next call (`Form.mark`), which names its buffers; None if it has none.

        calls: its kind and branch, or those of both calls that the halves of a cfg axis compute beside each other. A
        kind is equal on all ranks for calls whose ranks compute the same shapes as before. split: whether the halves
        compute different rows of one call. Otherwise they compute the same, by the residuals of the half that has them.
        """
        if any(kind is None for kind, _ in calls):
            self._now = self.home = None
            return None
        cfg, branches = self._state.mesh.cfg, [self._branch(kind, ordinal) for kind, ordinal in calls]
        if len({*branches}) < len(branches):  # one branch cannot have the residuals of two calls
            branches[0].restart()
            self._now = self.home = None
            return None
        for home, branch in enumerate(branches if len(branches) > 1 else ()):
            if branch.home not in (None, home):
                branch.restart()
            branch.home = home
        self._beside, self._now = branches, branches[cfg.rank if len(branches) > 1 else 0]
        if len(branches) == 1 and not self._now.computed:
            self._now.home = None  # both halves compute this step, and have what it leaves
        self.home = self._now.home if len(branches) == 1 and cfg.size > 1 and not split else None
        self._decided = None
        # a lone call has graphs of its own: both halves warm up together, and take part in the decision if both have
        # the residuals
        return self._now.number, len(branches), self.home

    def _branch(self, kind: Hashable, ordinal: int) -> _Branch:
        if (branch := self._branches.get((kind, ordinal))) is None:
            while len(self._branches) >= KEPT:
                self._branches.popitem(last=False)
            self._made += 1
            device = self._state.mesh.device
            integers: Any = {"dtype": torch.int64, "device": device}
            host, weights = torch.zeros(5, dtype=torch.int64), torch.eye(self.options.order + 1, dtype=torch.float64)[0]
            if device.type == "cuda":
                host, weights = host.pin_memory(), weights.pin_memory()
            seen, sums = torch.zeros(1, **integers), torch.zeros(2, **integers)
            branch = _Branch(self._made, ordinal, seen, sums, host, weights, weights.to(device))
            self._branches[kind, ordinal] = branch
        self._branches.move_to_end((kind, ordinal))
        return branch

    def has(self, call: Form) -> bool:
        """Return whether a call can leave blocks out."""
        return self.on and (self._of.time in call.tensors or self._of.time in call.values)

    # In a call ----------------------------------------------------------------------------------------------------

    @property
    def _rehearses(self) -> bool:
        # whether this run only warms up for a capture: it computes all and keeps nothing
        recording = self.recording()
        return recording is not None and recording.is_rehearsal

    def begin(self, mark: Hashable, arguments: Mapping[str, Any]) -> None:
        """Begin a call's computation. mark: what `enter` returned; None computes all blocks. arguments: whole."""
        branch, self._run, self._skips = self._now, None, False
        if mark is None or branch is None or mark != (branch.number, len(self._beside), self.home):
            return
        text, time = self.text_of(arguments), arguments[self._of.time]
        seen = bits(text).reshape(1) if text is not None else branch.seen.new_zeros(1)
        now = torch.as_tensor(time, device=branch.seen.device).double().max().reshape(1).view(torch.int64)
        self._rounds = isinstance(time, Tensor) and time.is_floating_point() and time.itemsize == 2
        counts = self.home is None or self.home == self._state.mesh.cfg.rank
        changed = seen.new_zeros(2)
        if counts:
            changed[self._beside.index(branch)] = (seen != branch.seen).squeeze()
        self._run = _Run(branch, changed, seen, now, counts and branch is self._beside[0])

    def check_ended(self) -> None:
        """Raise ValueError if others have left out the block at which this call's step would have ended."""
        if self._run is not None and self._run.streams:
            raise ValueError(
                f"something else left out the last block that {self.options} may leave out, and with it the result of "
                f"the others; compute that block, or choose another back= or no step cache"
            )

    def end(self) -> None:
        self._run = None

    def starts(self, x_BlE: Tensor) -> None:
        """Take the latents before the first block."""
        if self._run is not None:
            self._run.start_BlE = x_BlE

    def compares(self, streams: Mapping[str, Tensor], latents: Tensor) -> None:
        """End the head: compare its residual with the last computed step's. streams: inputs of the next block."""
        run = self._run
        if run is None or run.start_BlE is None:  # others have left out the first block
            self._run = None
            return
        branch, rehearses = run.branch, self._rehearses
        run.streams, run.put_back = streams, self._state.snapshot()
        before = branch.before_BlE
        if before is None:
            before = branch.before_BlE = torch.zeros_like(latents, memory_format=torch.contiguous_format)
        branch.sums.zero_()
        if run.decides:
            add_change(_three(latents), _three(run.start_BlE), _three(before), branch.sums)
        local = torch.cat([branch.sums, run.changed])
        for axis in _axes(self._state):
            local = self._state.exchanges.gathered("step cache", axis, local[None]).sum(0)
        if rehearses:
            return
        branch.seen.copy_(run.bits)
        branch.host.copy_(torch.cat([local, run.time]), non_blocking=True)
        if (recording := self._recording()) is not None:
            recording.cut(self._computes)
        else:
            self._skips = not self._computes() and bool(branch.residuals)
        if not self._skips:
            torch.sub(latents, run.start_BlE, out=before)

    def ends(self, results: Sequence[Tensor | None] | None) -> Sequence[Tensor | None]:
        """End the rest: keep its residual, or return what kept ones make. results: None if it was left out."""
        run, self._run = self._run, None
        if run is None or not run.streams:
            return results or ()  # others have left out a block from which on this call may leave blocks out
        branch = run.branch
        run.put_back()
        if results is None:
            made = [torch.empty_like(x) for x in branch.residuals[0]]
            self._reuse(run, made)
            kept = iter(made)
            return [next(kept) if is_there else None for is_there in branch.present]
        outputs = [x for x in results if x is not None]
        if not branch.residuals:
            branch.present = [x is not None for x in results]
            for _ in range(self.options.order + 1):
                branch.residuals.append([torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in outputs])
            self._reuse(run, [torch.empty_like(x) for x in outputs])  # a kernel cannot be compiled in a capture
            self._say(branch)
        if self._rehearses:
            return results
        for later, earlier in zip(branch.residuals[:0:-1], branch.residuals[-2::-1], strict=True):
            for x, of in zip(later, earlier, strict=True):
                x.copy_(of)
        for piece, out, residual in self._pieces(run, outputs, branch.residuals[0]):
            torch.sub(out, piece, out=residual)
        if (recording := self._recording()) is not None:
            recording.cut(lambda: not self._decided)
            self._reuse(run, outputs)
            recording.cut()
        return results

    def _pieces(
        self, run: _Run, outputs: Sequence[Tensor], residuals: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        # (stream before, output, residual) of each stream; one output may be several streams, joined in their order
        given, present = list(run.streams.values()), run.branch.present
        if len(given) == len(present):
            given = [x for x, is_there in zip(given, present, strict=True) if is_there]
            return list(zip(given, outputs, residuals, strict=True))
        sizes = [x.shape[1] for x in given]
        return list(zip(given, outputs[0].split(sizes, 1), residuals[0].split(sizes, 1), strict=True))

    def _reuse(self, run: _Run, outputs: Sequence[Tensor]) -> None:
        if self.options.order:
            run.branch.weights_J.copy_(run.branch.weights, non_blocking=True)
        by_age = [self._pieces(run, outputs, residuals) for residuals in run.branch.residuals]
        for same in zip(*by_age, strict=True):
            residuals = [_three(residual) for *_, residual in same]
            extrapolate(_three(same[0][0]), residuals, run.branch.weights_J, _three(same[0][1]))

    def _recording(self) -> Recording | None:
        recording = self.recording()
        return recording if recording is not None and recording.is_open else None

    @property
    def runs(self) -> bool:
        """Whether a call is computed that may leave blocks out."""
        return self._run is not None

    @property
    def skips(self) -> bool:
        """Whether this call leaves them out."""
        return self._run is not None and self._skips

    # Deciding -----------------------------------------------------------------------------------------------------

    def _computes(self) -> bool:
        # waits for the head, and decides; all ranks read the same numbers
        assert self._now is not None
        changed_by, size, texts, time = self._read(self._now)
        beside = zip(self._beside, texts, strict=False)
        decided = {branch.number: self._follow(branch, changed_by, size, text, time) for branch, text in beside}
        self._decided = decided[self._now.number]
        return self._decided

    def _follow(self, branch: _Branch, changed_by: int, size: int, other_text: int, time: float) -> bool:
        leads, at = branch.ordinal == 0, len(self.log) - 1
        ended = branch.times and (other_text or not branch.continues(time, self._rounds))
        if ended:  # another run, which nothing has announced
            branch.restart()
            if leads:
                self.forget()
                self.log = []
        branch.times = [*branch.times[:1], time]
        if leads:
            at = len(self.log)
            computes = self._decides(branch, at, changed_by, size)
            self.log.append(CachedStep(computes, changed_by / size if branch.computed and size else None))
            self.counted = [self.counted[0] + computes, self.counted[1] + 1]
        else:
            # as the first branch in this step, if the residual is of the step whose residual that one has
            lead = next((number for number in range(at - 1, -1, -1) if self.log[number].computed), None)
            computes = at < 0 or self.log[at].computed or branch.computed[:1] != [lead]
        if computes:
            branch.computed = [max(at, 0), *branch.computed][: self.options.order + 1]
        else:
            self._weigh(branch, at)
        return computes

    def _decides(self, branch: _Branch, at: int, changed_by: int, size: int) -> bool:
        options = self.options
        if not branch.computed:
            return True
        if options.mask:
            return options.mask[at % len(options.mask)] == "1"
        if at < options.warmup or at - branch.computed[0] > options.most:
            return True
        assert options.threshold is not None
        return not changed_by <= options.threshold * size

    def _weigh(self, branch: _Branch, at: int) -> None:
        # Lagrange weights of the residuals of computed steps; a missing residual has the weight 0
        if self.options.order == 0:
            return
        steps, weights = branch.computed, [0.0] * (self.options.order + 1)
        for index, step in enumerate(steps):
            weights[index] = 1.0
            for other in steps:
                weights[index] *= (at - other) / (step - other) if other != step else 1.0
        branch.weights.copy_(torch.tensor(weights, dtype=torch.float64))

    def _read(self, branch: _Branch) -> tuple[int, int, list[int], float]:
        if branch.seen.is_cuda:
            event = torch.cuda.Event()
            event.record()
            watch = self._state.mesh.world.watch
            while not event.query() and (watch is None or watch.failed is None):
                pass  # a pause would be longer than the wait
        changed_by, size, *texts, _ = branch.host.tolist()
        return changed_by, size, texts, branch.host[4:].view(torch.float64).item()

    def _say(self, branch: _Branch) -> None:
        kept = [branch.before_BlE, *(x for residuals in branch.residuals for x in residuals)]
        count = sum(x.numel() * x.element_size() for x in kept if x is not None)
        self._state.say(f"step cache {self.options}: {count / 1e9:.2f} GB on rank 0 for each branch of a size")


@dataclass
class _Run:
    """A call while it is computed. changed: of both calls side by side, whether the text of the one that this rank
    computes has other bits than in the last call of its branch.

    decides: whether this rank's latents take part in the decision.
    """

    branch: _Branch
    changed: Tensor
    bits: Tensor
    time: Tensor
    decides: bool
    start_BlE: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    put_back: Callable[[], None] = lambda: None


class StepHook(ModelHook):
    """A block of a transformer with a step cache. names: the inputs that its outputs replace, in order.

    fused: what may compute the block in place of the module's forward.
    """

    def __init__(
        self, cache: StepCaching, names: tuple[str, ...], starts: bool, compares: bool, may_skip: bool, ends: bool
    ) -> None:
        super().__init__()
        self._cache, self._names = cache, names
        self.fused: FusedBlocks | None = None
        self._starts, self._compares, self._may_skip, self._ends = starts, compares, may_skip, ends

    def compute(self, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns, or its inputs if it is left out."""
        cache = self._cache
        inside = None if self.fused is None else self.fused.hooks.get(module)  # which may change between calls
        if inside is not None:
            own = partial(inside.compute, own, module)
        if not cache.runs or not (self._starts or self._may_skip):
            return own(*args, **kwargs)
        given = dict(zip(parameters(module), args, strict=False)) | kwargs
        streams = {name: given[name] for name in self._names}
        latents = streams.get("hidden_states", streams[self._names[0]])
        if self._starts:
            cache.starts(latents)
        if self._compares:
            cache.compares(streams, latents)
        if not self._may_skip:
            return own(*args, **kwargs)
        if cache.skips:
            passed = cache.ends(None) if self._ends else list(streams.values())
            return tuple(passed) if len(passed) > 1 else passed[0]
        out = own(*args, **kwargs)
        if not self._ends:
            return out
        outputs = cache.ends(list(out) if isinstance(out, tuple) else [out])
        return tuple(outputs) if isinstance(out, tuple) else outputs[0]


def _three(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[None] if x.dim() == 2 else x.flatten(1, -2)


def _axes(state: CallState) -> list[Axis]:
    mesh = state.mesh
    return [axis for axis in (mesh.sequence, mesh.cfg, mesh.data) if axis.size > 1]
