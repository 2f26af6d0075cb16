"""Puts the functions of `seqpar.families` in the place of a transformer's blocks, where they fit.

A function computes on the weights of diffusers' modules: weights of several layers that are one GEMM become views of
one matrix. It runs inside all hooks, so that third-party hooks and wrappers around a block stay right. Blocks and calls
that a function does not take are computed by the block's own forward, and rank 0 prints why.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any, TypeVar

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn

from seqpar.families._block import DeclinedError, Input, Matrix
from seqpar.families._cuts import HOME
from seqpar.families._find import BLOCKS
from seqpar.families._matrix8 import Matrix8, quantised
from seqpar.kernels.linear import why_not_faster
from seqpar.kernels.rows8 import Rounding
from seqpar.kernels.weight8 import Weight8, original
from seqpar.loading.parking import bring
from seqpar.loading.random import WithoutValues
from seqpar.transformer import lora as adapters
from seqpar.transformer.attention import AttentionHook, ShardedAttention
from seqpar.transformer.calibration import Calibration
from seqpar.transformer.foreign import BY_TOKEN, Addition, is_patched
from seqpar.transformer.forward import CallState
from seqpar.types.protocols import Qkv8


def with_adapters(layers: Sequence[nn.Module], own: Matrix, scale: float, room: Matrix | None) -> Matrix:
    # a copy of a matrix with the active adapters of its layers, computed in fp32 and rounded once, in the memory `room`
    # (of a weight in 8 bits: computed from the weight before it was rounded)
    eight = isinstance(own.weight, Weight8)
    weight_FE = own.weight.new_empty(own.weight.shape) if eight else copied_into(own.weight, room and room.weight)
    bias_F = None if own.bias is None else copied_into(own.bias, room and room.bias)
    start = 0
    for layer in layers:
        base: Any = adapters.base_of(layer)
        mine = slice(start, start + len(base.weight))
        weight, bias = adapters.merged(layer, scale) if adapters.active(layer) else (None, None)
        if weight is None and eight:
            weight = original(base.weight)
        if weight is not None:
            weight_FE[mine].copy_(weight)
        if bias is not None and bias_F is not None:
            bias_F[mine].copy_(bias)
        start = mine.stop
    if not eight:
        return Matrix(weight_FE, bias_F)
    if room is None or not isinstance(room.weight, Weight8):
        return Matrix(Weight8.of(weight_FE, lambda: weight_FE, loaded=False), bias_F)
    room.weight.write(weight_FE)
    room.weight.came_from(lambda: weight_FE, loaded=False)
    return Matrix(room.weight, bias_F)


def restore(layers: Iterable[Any]) -> None:
    """Give layers the weights as they were before they were rounded to 8 bits."""
    for layer in layers:
        if isinstance(weight := layer.weight, Weight8):
            layer.weight = nn.Parameter(weight.original(), weight.requires_grad)


@contextmanager
def unrounded(module: nn.Module) -> Iterator[None]:
    """Compute in this context with the weights before they were rounded to 8 bits, which are there besides."""
    bring(module)
    parts = (part for _, part in adapters.without_adapters(module))
    stored = [part for part in parts if isinstance(part._parameters.get("weight"), Weight8)]
    before: list[Any] = [(layer, layer.weight) for layer in stored]
    try:
        with torch.inference_mode(False):
            restore(stored)
        yield
    finally:
        bring(module)
        for layer, weight in before:
            layer.weight = weight


def copied_into(like: Tensor, room: Tensor | None) -> Tensor:
    """Return a copy of a tensor, in the memory that is there already if it fits."""
    if room is None or (room.shape, room.dtype, room.device) != (like.shape, like.dtype, like.device):
        room = torch.empty_like(like)
    return room.copy_(like)


def rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor that is some parameters one below the other; several become views of it."""
    if len(parts) == 1:
        return parts[0].detach()
    eight = [part for part in parts if isinstance(part, Weight8)]
    if len(eight) == len(parts):
        return _rows8(eight)
    whole = joined(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        for part, mine in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = mine
    return whole


def _rows8(parts: Sequence[Weight8]) -> Weight8:
    # the same of weights in 8 bits
    values, scales = joined([part.e4m3 for part in parts]), joined([part.scales for part in parts])
    if values is None or scales is None:
        values, scales = torch.cat([part.e4m3 for part in parts]), torch.cat([part.scales for part in parts])
        sizes = [len(part) for part in parts]
        for part, *memory in zip(parts, values.split(sizes), scales.split(sizes), strict=True):
            part.e4m3, part.scales = memory
    loaded = all(part.loaded for part in parts)
    return Weight8(values, scales, parts[0].dtype, lambda: torch.cat([part.original() for part in parts]), loaded)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows the parts are, without a copy, or None if they are not contiguous."""
    first, end = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == end and part.dtype == first.dtype):
            return None
        end += part.numel() * part.element_size()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())


Built = tuple[type, type, dict[str, Any]]  # class, class of the attention processor, settings that are plain values
CHANGED = ("training", "gradient_checkpointing", "fused_projections")  # settings that change nothing here


def differences(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) for modules of another class, or with other settings, than the config gives them.

    Paths are those without adapters. An attention processor counts as a part of its module.
    """
    plain = expected(module)
    for path, part in adapters.without_adapters(module):
        if path not in plain:
            continue
        kind, processor, settings = plain[path]
        if type(part) is not kind:
            yield path, f"{path} is a {type(part).__name__} and no {kind.__name__}"
        for key, value in settings.items():
            if (now := vars(part).get(key, value)) != value:
                yield path, f"{path}.{key} is {now!r} and not {value!r}"
        if type(current := getattr(part, "processor", None)) is not processor:
            yield path, f"an attention processor is a {type(current).__name__}"
        elif current is not None and is_patched(processor, "__call__"):
            yield path, f"{processor.__name__}.__call__ is replaced"


def expected(module: Any) -> Mapping[str, Built]:
    """Return how diffusers builds the modules of a transformer from its config, by their paths; it is cached."""
    known = inspect.signature(type(module).__init__).parameters  # a config may hold others, which diffusers keeps
    return _built(type(module), _Config({key: value for key, value in module.config.items() if key in known}))


class _Config(dict[str, Any]):
    # the arguments of a class of transformers, as a key of the cache
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))


@cache
def _built(kind: type, config: _Config) -> dict[str, Built]:
    def settings(part: nn.Module) -> dict[str, Any]:
        return {k: x for k, x in vars(part).items() if isinstance(x, (bool, int, float, str)) and k not in CHANGED}

    with torch.device("meta"), WithoutValues():
        module: nn.Module = kind(**deepcopy(config))
    parts = module.named_modules()
    return {path: (type(part), type(getattr(part, "processor", None)), settings(part)) for path, part in parts}


T = TypeVar("T")
NO_ROOM = "copies of their weights with merged adapters do not fit into the memory of every rank"


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, block) of a transformer's blocks whose class has a function, which may not compute these ones."""
    parts = ((path, part, type(part)) for path, part in adapters.without_adapters(module))
    return [(path, part) for path, part, kind in parts if kind.__name__ in BLOCKS and kind.__module__.startswith(HOME)]


class FusedBlocks:
    """The blocks of one transformer for which there are functions: what computes each, and the reasons why not.

    parts: returns the parts of blocks between which a step cache may stop; blocks of one part share what they compute.
    """

    def __init__(
        self,
        module: nn.Module,
        state: CallState,
        on: bool,
        calibration: Calibration | None = None,
        parts: Callable[[], Mapping[nn.Module, int]] = dict,
    ) -> None:
        self._parts = parts
        self._module, self._state, self.on, self.calibration = module, state, on, calibration
        self.eight = calibration is not None  # whether GEMMs that can compute in 8 bits do so
        self._in_8 = dict[tuple[nn.Module, str], Matrix8]()
        self._blocks: list[tuple[str, nn.Module]] = []
        self._copies: dict[tuple[nn.Module, str], Matrix] = {}
        self._merges = True  # as long as the copies fit into the memory of every rank
        self.lacks_memory = False  # copies did not fit on this rank: no function computes until `end_copies` on all
        self.scale = 1.0
        self.hooks: dict[nn.Module, BlockHook] = {}
        self.reasons: dict[str, str] = {}
        self._text: str | None = None  # what `text` returns, until weights are taken again

    @property
    def merged(self) -> bool:
        """Whether adapters are merged into copies of weights, at `scale`."""
        return bool(self._copies)

    @property
    def copies(self) -> Mapping[str, Tensor]:
        """These copies by the names of blocks and matrices, biases too."""
        paths = {block: path for path, block in self._blocks}
        copies = {f"{paths[block]}, {name}": matrix for (block, name), matrix in self._copies.items()}
        weights = {f"{name} weight": matrix.weight for name, matrix in copies.items()}
        return weights | {f"{name} bias": x.bias for name, x in copies.items() if x.bias is not None}

    @property
    def is_copied(self) -> bool:
        """Whether blocks compute with copies of weights, which a write to these does not change."""
        return self.eight and bool(self._in_8)

    @property
    def in_8_bits(self) -> Mapping[str, Matrix8]:
        """The matrices that compute in 8 bits, by the names in the calibration."""
        paths = {block: path for path, block in self._blocks}
        return {f"{paths[block]}, {name}": matrix for (block, name), matrix in self._in_8.items()}

    def rescale(self, scale: float) -> None:
        """Multiply the scales of active adapters by another number from now on, as a call's `scale` does."""
        if scale != self.scale:
            self.scale = scale
            if self._copies:
                self._take_weights()

    def refresh(self, additions: Sequence[Addition], attention: Mapping[nn.Module, AttentionHook]) -> None:
        """Rescan the blocks; functions compute every block that they fit.

        additions: third-party code on the transformer's modules. attention: attention module -> what splits it.
        """
        self._blocks = blocks_of(self._module) if self.on else []
        self.hooks = {block: self.hooks.get(block) or BlockHook(block, self._state) for _, block in self._blocks}
        self.reasons = _reasons(self._module, self._blocks, additions) if self._blocks else {}
        for path, block in self._blocks:
            hook = self.hooks[block]
            joining = next((attention[part] for part in block.modules() if part in attention), None)
            hook.attention, hook.rounds = (None, None) if joining is None else (joining.attention, joining.eight)
            if (reason := hook.why_not_joined()) is not None:
                self.reasons.setdefault(path, reason)
        self._merges = self._merges or not any(map(adapters.are_on, self.hooks))
        self._settle()

    def end_copies(self) -> None:
        """Leave blocks with adapters to diffusers, until no adapter is active; every rank must call this at once."""
        self._merges = False
        self._settle()
        torch.cuda.empty_cache()  # transports take memory that torch does not keep

    def refuse_memory(self) -> None:
        """Raise OutOfMemoryError if copies do not fit, found in the middle of a call, which others compute already."""
        if self.lacks_memory and self._state.axis.size > 1:
            raise torch.OutOfMemoryError(
                "Copies of weights with merged adapters do not fit into the memory of this rank. From the next call "
                "on, adapters are computed by their own layers on all ranks"
            )

    def _settle(self) -> None:
        if not self._merges:
            self.reasons = dict.fromkeys(self._adapted(), NO_ROOM) | self.reasons
        self._take_weights()
        kinds: dict[str, list[str]] = {}  # reasons that differ in the place alone
        for path, reason in self.reasons.items():
            kinds.setdefault(re.sub(rf"\b{re.escape(path)}\b[\w.]*", "", reason), []).append(reason)
        for reasons in kinds.values():
            first = f" (first of {len(reasons)})" if len({*reasons}) > 1 else ""
            self._state.say(
                f"{len(reasons)} of {len(self._blocks)} blocks are diffusers' own, because {reasons[0]}{first}"
            )
        computed = (hook.matrices.values() for hook in self.hooks.values() if hook.all_matrices)
        if (
            why := why_not_faster(
                matrix.weight for matrices in computed for matrix in matrices if matrix.rounding is None
            )
        ) is not None:
            self._state.say(f"activations are separate kernels after cuBLAS's GEMMs: {why}")

    def _adapted(self) -> list[str]:
        return [path for path, block in self._blocks if adapters.are_on(block)]

    def _take_weights(self) -> None:
        self.lacks_memory, self._text = False, None
        try:
            self._merge()
        except torch.OutOfMemoryError:
            if self.reasons.keys() >= set(self._adapted()):
                raise  # there are no copies: the model itself does not fit
            self._copies, self.lacks_memory = {}, True
            for hook in self.hooks.values():
                hook.take((), (), None)

    @torch.no_grad()
    def _merge(self) -> None:
        # hand the weights, or copies with merged adapters, to the hooks of the blocks that functions compute
        by_kind: dict[tuple[str, int], list[nn.Module]] = {}
        parts = self._parts()
        for path, block in self._blocks:
            if path in self.reasons:
                self.hooks[block].take((), (), None)
            else:
                by_kind.setdefault((type(block).__name__, parts.get(block, 0)), []).append(block)
        before, self._copies = self._copies, {}
        rooms, self._in_8 = self._in_8, {}
        for (kind, part), blocks in by_kind.items():
            matrices = [self._computing(block, BLOCKS[kind].layers, before, rooms) for block in blocks]
            for index, block in enumerate(blocks):
                self.hooks[block].take(blocks, matrices, index, part)

    def _computing(
        self,
        block: nn.Module,
        products: Mapping[str, Sequence[str]],
        before: Mapping[tuple[nn.Module, str], Matrix],
        rooms: Mapping[tuple[nn.Module, str], Matrix8],
    ) -> dict[str, Matrix]:
        own = self._matrices(block, products, before)
        matrices = self._in_8_bits(block, own, rooms)
        for name, matrix in own.items():
            if (block, name) in self._copies and isinstance(matrix.weight, Weight8):
                matrix.weight.came_from(None, loaded=False)  # nothing else reads what was merged
        return matrices

    def _matrices(
        self, block: nn.Module, products: Mapping[str, Sequence[str]], before: Mapping[tuple[nn.Module, str], Matrix]
    ) -> dict[str, Matrix]:
        # its layers' own weights, or copies with merged adapters; the memory of those before is written again, so that
        # a change of scales alone keeps all addresses
        matrices, wide = dict[str, Matrix](), frozenset() if self.calibration is None else self.calibration.wide
        with torch.inference_mode(False):  # weights outlive the caller's mode
            for name, paths in products.items():
                layers = [adapters.layer_at(block, path) for path in paths]
                if None in layers:  # some sizes of a model have none
                    continue
                base: list[Any] = [adapters.base_of(layer) for layer in layers]
                if self._key(block, name) in wide:
                    restore(base)
                biases = [layer.bias for layer in base if layer.bias is not None]
                matrices[name] = Matrix(rows([x.weight for x in base]), rows(biases) if biases else None)
                if any(adapters.active(layer) for layer in layers):
                    copy = with_adapters(layers, matrices[name], self.scale, before.get((block, name)))
                    matrices[name] = self._copies[block, name] = copy
        return matrices

    def _in_8_bits(
        self, block: nn.Module, matrices: dict[str, Matrix], rooms: Mapping[tuple[nn.Module, str], Matrix8]
    ) -> dict[str, Matrix]:
        known = self.calibration
        if known is None or not self.eight:
            return matrices
        first = next(iter(matrices.values())).weight
        if first.is_cuda and first.dtype != torch.bfloat16:
            self._state.say(f"GEMMs are not computed in 8 bits, because weights are {first.dtype}, not bfloat16")
            return matrices
        keys = {name: self._key(block, name) for name in BLOCKS[type(block).__name__].eight if name in matrices}

        # matrices that read one input have one centre, and one object says so
        roundings, eight = list[Rounding](), dict[str, Matrix8]()
        for name, key in keys.items():
            mean = known.means.get(key)
            wanted = Rounding(None if mean is None else mean.to(matrices[name].weight.device))
            reads = next((other for other in roundings if other.equals(wanted)), wanted)
            roundings.append(reads)
            if key not in known.wide:
                weight = matrices[name].weight
                product = known.products.get(key) if isinstance(weight, Weight8) and weight.loaded else None
                room = rooms.get((block, name))
                eight[name] = quantised(matrices[name], reads, key in known.fast, room, product)
        self._in_8 |= {(block, name): matrix for name, matrix in eight.items()}
        return matrices | eight

    def _key(self, block: nn.Module, name: str) -> str:
        # the name of a GEMM in a calibration
        return f"{next(path for path, part in self._blocks if part is block)}, {name}"

    def text(self) -> str:
        """Return what computes the blocks, as a text that must be equal on all ranks."""
        if self._text is None:
            self._text = self._described()
        return self._text

    def _described(self) -> str:
        if not self.hooks:
            return "by its own modules"
        own = next((f", {len(self.reasons)} by its own modules, because {why}" for why in self.reasons.values()), "")
        every = [matrix for hook in self.hooks.values() if hook.all_matrices for matrix in hook.matrices.values()]
        eight = [matrix for matrix in every if isinstance(matrix, Matrix8)]
        fast = f", {sum(matrix.fast for matrix in eight)} with fast sums" if eight else ""
        bits = f", {len(eight)} of {len(every)} GEMMs in 8 bits{fast}" if eight else ""
        return f"{len(self.hooks) - len(self.reasons)} blocks by fused kernels{bits}{own}"


class BlockHook(ModelHook):
    """Computes a block by a function of `seqpar.families`; it is the `BlockCall` that the function gets."""

    def __init__(self, block: nn.Module, state: CallState) -> None:
        super().__init__()
        self._state, self._kind = state, type(block).__name__
        self._function, self._streams = BLOCKS[self._kind].compute, BLOCKS[self._kind].streams
        self.attention: ShardedAttention | None = None  # of the block's attention module
        self.rounds: Qkv8 | None = None  # how it is rounded to 8 bits
        self.blocks: Sequence[nn.Module] = ()
        self.all_matrices: Sequence[Mapping[str, Matrix]] = ()
        self.index: int | None = None
        self._part = 0  # of the blocks between which a step cache may stop

    def take(
        self, blocks: Sequence[nn.Module], matrices: Sequence[Mapping[str, Matrix]], index: int | None, part: int = 0
    ) -> None:
        # compute with these from now on; without an index by the block's own forward
        self.blocks, self.all_matrices, self.index, self._part = blocks, matrices, index, part

    def why_not_joined(self) -> str | None:
        """Return why the cuts of the transformer are not those for which the function is written, or None."""
        joined = () if self.attention is None else self.attention.joint.streams
        if joined == self._streams or len(joined) == len(self._streams) == 1:  # a single stream may have any name
            return None
        return f"the cuts do not join {' and '.join(self._streams)} in its attention"

    @property
    def matrices(self) -> Mapping[str, Matrix]:
        return self.all_matrices[self.index or 0]

    def compute(self, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns. own: its forward, which computes outside of a call."""
        if self.index is None or not self._state.active:
            return own(*args, **kwargs)
        device, dtype = self._state.mesh.device.type, next(iter(self.matrices.values())).weight.dtype
        if torch.is_autocast_enabled(device) and dtype not in (torch.get_autocast_dtype(device), torch.float64):
            return own(*args, **kwargs)
        try:
            return self._function(self, module, *args, **kwargs)
        except DeclinedError as reason:
            self._state.say(f"diffusers' own {type(module).__name__} computes this call, because {reason}")
        return own(*args, **kwargs)

    # What a function may use; see `BlockCall` ----------------------------------------------------------------------

    @property
    def attend(self) -> Callable[..., tuple[Input, ...]]:
        assert self.attention is not None
        return partial(self.attention.of_streams, eight=self.rounds)

    def local(self, q_BlHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        return self._state.local(q_BlHD, mask_BL is not None)(q_BlHD, k_BLGD, v_BLGD, mask_BL)[0]

    def attend_whole(self, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor) -> Tensor:
        assert self.attention is not None
        total = self._state.lengths.get(self.attention.joint.streams[0], k_BlGD.shape[1])
        return self._state.attend_whole(q_BLHD, k_BlGD, v_BlGD, total)

    def once(self, name: str, of: Any, make: Callable[[], T], *, shared: bool = False) -> T:
        return self._state.once(name if shared else (self._kind, self._part, name), of, make)

    def spread(self, name: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        return self._state.spread(f"{name} {self._part}" if self._part else name, widths, make)

    def hand_over(self, x_BlE: Tensor, made: Any) -> None:
        # what another block left and no block took would keep its memory until the end of the forward
        self._state.handed = {key: left for key, left in self._state.handed.items() if left[2] is self}
        self._state.handed[id(x_BlE)] = x_BlE, made, self

    def handed(self, x_BlE: Tensor) -> Any:
        left = self._state.handed.pop(id(x_BlE), None)
        # a skipped block passes x on as it was, but what was left beside it has that block's modulation
        if left is None or left[2].all_matrices is not self.all_matrices or left[2].index + 1 != self.index:
            return None
        return left[1]


def _reasons(
    module: nn.Module, blocks: Sequence[tuple[str, nn.Module]], additions: Sequence[Addition]
) -> dict[str, str]:
    # path -> reason, for the blocks that no function may compute
    if not type(module).__module__.startswith(HOME):
        return {path: f"{type(module).__name__} is no class of diffusers" for path, _ in blocks}
    known, paths, reasons = [*differences(module)], {path for path, _ in blocks}, {}
    for addition in additions:
        by_token = f"{getattr(addition.what, '__module__', None)}".startswith(BY_TOKEN)
        known += [] if by_token and addition.path in paths else [(addition.path, str(addition))]
    for path, block in blocks:
        # inside of the block, or around it, as a wrapper is
        near = ((f"{where}.", reason) for where, reason in known if where)
        inside = next((why for where, why in near if where.startswith(f"{path}.") or path.startswith(where)), None)
        if reason := inside or _why_not(block) or BLOCKS[type(block).__name__].why_not(block):
            reasons[path] = reason
    return reasons


def _why_not(block: nn.Module) -> str | None:
    first, dtypes = next(block.parameters()), set[torch.dtype]()
    known = {path for paths in BLOCKS[type(block).__name__].layers.values() for path in paths}
    for path, layer in adapters.layers(block):
        if adapters.active(layer) and path not in known:
            return f"an adapter is on {path}, which is in none of their GEMMs"
        if adapters.active(layer) and (reason := adapters.why_not_merge(layer)) is not None:
            return reason
    eight = set[str]()
    for path, part in adapters.without_adapters(block):
        for weight in part._parameters.values():
            if weight is None:
                continue
            eight |= {path} if isinstance(weight, Weight8) else set()
            known = type(weight) in (nn.Parameter, Weight8)
            if not known or not weight.is_floating_point() or weight.itemsize < 2:
                return f"a weight is a {type(weight).__name__} of {weight.dtype}, as in a quantised model"
            if weight.device != first.device or weight.device.type == "meta":
                return "weights are not all on one device"
            dtypes |= {weight.dtype} if isinstance(part, nn.Linear) else set()
    for paths in BLOCKS[type(block).__name__].layers.values():
        if len({path in eight for path in paths}) > 1:
            return f"some weights of one GEMM are stored in 8 bits and others are not: {', '.join(paths)}"
    return None if len(dtypes) == 1 else "linear layers have different dtypes"
