"""Finds and merges adapters (LoRA and its kin), and says as texts what must be equal on all ranks.

peft wraps linear layers in a diffusers module by layers that hold low-rank factors, scales and flags. peft is imported
only by those who use it.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.kernels.weight8 import Weight8, original
from seqpar.loading.errors import context
from seqpar.loading.lora import Lora, Models, adapter, fitted, load
from seqpar.loading.originals import arriving, hold
from seqpar.loading.parking import bring, seat_of
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.foreign import Addition
from seqpar.transformer.internals import adapters_of
from seqpar.vae.pipeline import attach


def check_switched(lora: Lora, kind: Any, models: Models) -> dict[Lora, dict[str, int]]:
    """Return the LoRA with each transformer that it can change -> path -> number of weights of the layers changed.

    Raises ValueError as `check`, and for a file that cannot be merged into weights of the transformer alone, which can
    be undone. A file that does not say its transformer must fit all of them.
    """
    changed = dict[Lora, dict[str, int]]()
    for number, (placed, model) in enumerate(fitted((lora,), kind, models, anywhere=True), 1):
        if placed.changes_encoders:
            raise ValueError(f"got --lora {lora.path} that changes a text encoder, expected the transformer alone")
        with context(f"got --lora {lora.path}, which cannot be merged"):
            terms_of(model, adapter(number))
        sizes = {path: base_of(layer).weight.numel() for path, layer in layers(model)}  # pyright: ignore
        changed[placed] = {f"{placed.part}.{path}": size for path, size in sizes.items()}
    return changed


def merge(pipe: Any, loras: Sequence[Lora]) -> str | None:
    """Merge loaded files into the weights of a pipeline's transformers; return why they stay beside these, or None."""
    reasons = list[str]()
    for part in dict.fromkeys(lora.part for lora in loras):
        scales = {adapter(number): lora.scale for number, lora in enumerate(loras, 1) if lora.part == part}
        model = getattr(pipe, part)
        model.set_adapters(list(scales), [1.0 for _ in scales])
        try:
            every = {name: terms_of(model, name) for name in scales}
        except ValueError as reason:
            model.set_adapters(list(scales), list(scales.values()))
            reasons.append(str(reason))
            continue
        model.unload_lora()
        Merging(model, every).switch(tuple(scales.items()))
    return "; ".join(reasons) or None


def switched(pipe: Any, loras: Mapping[str, Lora], mesh: Mesh) -> Merging:
    """Return the LoRAs that `check_switched` accepted, by their names, none of them merged yet. Collective."""
    every = {}
    for name, lora in loras.items():
        load(pipe, (lora,))
        model = getattr(pipe, lora.part)
        every[name] = {f"{lora.part}.{path}": term for path, term in terms_of(model, adapter(1)).items()}
        model.unload_lora()
    return Merging(pipe, every, mesh)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_adapter(module: nn.Module) -> bool:
    """Return whether this is one of peft's layers around a layer of the model."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # no layer is wrapped before peft is imported
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def base_of(module: nn.Module) -> nn.Module:
    """Return the model's own layer inside of an adapter's layer; other modules are returned as they are."""
    return module.get_base_layer() if is_adapter(module) else module  # pyright: ignore[reportCallIssue]


def without_adapters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the model's own modules, under the names that they have without adapters."""
    yield prefix, module
    for name, child in module.named_children():
        yield from without_adapters(base_of(child), f"{prefix}.{name}" if prefix else name)


def layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the adapters' layers, under the names of the layers that they wrap."""
    for prefix, own in without_adapters(module):
        for name, child in own.named_children():
            if is_adapter(child):
                yield f"{prefix}.{name}" if prefix else name, child


def layer_at(module: nn.Module, path: str) -> Any:
    """Return the layer, or the adapters' layer around it, at a path without these; None where the model has none."""
    layer: Any = module
    for name in path.split("."):
        layer = None if layer is None else getattr(base_of(layer), name)
    return layer


# Merging -------------------------------------------------------------------------------------------------------


def active(layer: nn.Module) -> tuple[str, ...]:
    """Return the adapters that a layer of peft applies beside its base layer; fused ones are in the weights already."""
    wrapper: Any = layer
    if not is_adapter(layer) or wrapper.disable_adapters or wrapper.merged:
        return ()
    known = adapters_of(wrapper)
    return tuple(name for name in wrapper.active_adapters if name in known)


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Disable the active adapters of all layers; merged ones stay merged."""
    with ExitStack() as stack:
        for _, layer in layers(module):
            if active(layer):
                stack.callback(attach(layer, {"forward": base_of(layer).forward}))
        yield


def are_on(module: nn.Module) -> bool:
    """Return whether adapters are active on a layer of a module."""
    return any(active(layer) for _, layer in layers(module))


def why_not_merge(layer: nn.Module) -> str | None:
    """Return why the active adapters of a layer cannot be merged into its weight, or None."""
    wrapper: Any = layer
    tuner = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
    kind = type(wrapper).__module__.removeprefix("peft.tuners.")
    if not isinstance(wrapper.get_base_layer(), nn.Linear) or wrapper.get_base_layer() is not wrapper.base_layer:
        return f"an adapter ({kind}) wraps a {type(wrapper.base_layer).__name__}, which is no linear layer"
    if type(wrapper).merge is tuner.merge:
        return f"adapters of the type {kind} cannot be merged into a weight"
    variants = getattr(wrapper, "lora_variant", {})
    for name in active(wrapper):
        if name in variants and not wrapper.use_dora.get(name):
            return f"adapter {name} is a {type(variants[name]).__name__}, which changes more than a weight"
    return None


def merged(layer: nn.Module, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a wrapped linear layer with its active adapters merged, in fp32 (fp64 for fp64).

    The bias is None if the adapters do not change it. scale: multiplies the scales of the active adapters.
    """
    wrapper: Any = layer
    base = wrapper.get_base_layer()
    wide = torch.promote_types(base.weight.dtype, torch.float32)
    if any(why_not_plain(wrapper, name) is not None for name in active(wrapper)):
        wrapper = copy.deepcopy(wrapper)  # peft merges into this copy; the layer itself stays as it is
        wrapper.get_base_layer().weight = nn.Parameter(original(base.weight).to(wide, copy=True))
        wrapper = wrapper.to(wide)
        if hasattr(wrapper, "scale_layer"):
            wrapper.scale_layer(scale)
        wrapper.merge(adapter_names=list(active(wrapper)))
        base = wrapper.get_base_layer()
        return base.weight.data, None if base.bias is None else base.bias.data
    return with_terms(base.weight, base.bias, [(term_of(wrapper, name), scale) for name in active(wrapper)])


@dataclass(frozen=True)
class LoraTerm:
    """What a LoRA adds to a linear layer at scale 1: factor * B A to its weight (F, E), factor * bias to its bias."""

    a_RE: Tensor
    b_FR: Tensor
    bias_F: Tensor | None
    factor: float


def term_of(layer: Any, name: str) -> LoraTerm:
    """Return what an adapter adds to its layer, for which `why_not_plain` has no reason."""
    a, b = layer.lora_A[name], layer.lora_B[name]
    return LoraTerm(
        a.weight.detach(), b.weight.detach(), None if b.bias is None else b.bias.detach(), layer.scaling[name]
    )


def why_not_plain(layer: Any, name: str) -> str | None:
    """Return why an adapter is more than a matrix that is added to a weight, or None."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(layer) is not lora.Linear or layer.fan_in_fan_out:
        return f"is of the type {type(layer).__module__.removeprefix('peft.tuners.')}"
    return f"is a {type(layer.lora_variant[name]).__name__}" if name in layer.lora_variant else None


def with_terms(
    weight_FE: Tensor, bias_F: Tensor | None, terms: Sequence[tuple[LoraTerm, float]]
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias with terms of LoRAs, each at a scale, in fp32 (fp64 for fp64); no bias if none has one."""
    wide = torch.promote_types(weight_FE.dtype, torch.float32)
    weight, bias = original(weight_FE).to(wide, copy=True), None  # in its place: memory's rate is what limits this
    for term, scale in terms:
        factor = term.factor * scale
        weight.addmm_(term.b_FR.to(wide), term.a_RE.to(wide), alpha=factor)
        if term.bias_F is not None and bias_F is not None:
            bias = (bias_F.to(wide) if bias is None else bias) + factor * term.bias_F.to(wide)
    return weight, bias


# The same on all ranks -----------------------------------------------------------------------------------------


def texts(module: nn.Module, hooks: Iterable[Addition]) -> dict[str, str]:
    """Return what must be equal on all ranks: a module's adapters, attention processors and hooks, as texts by name.

    They are equal on ranks that made the same calls. This waits for the device.
    """
    adapted = dict(layers(module))
    attention = {name: part.processor for name, part in without_adapters(module) if hasattr(part, "processor")}
    return {
        "adapters": _counted({name: _applied(layer) for name, layer in adapted.items()}),
        "scales of adapters": _counted({name: _scales(layer) for name, layer in adapted.items()}),
        "values of adapters": _digest(_sums(adapted.values())),
        "hooks": _counted({str(hook): hook.kind for hook in hooks}),
        "attention processors": _counted({name: type(processor).__name__ for name, processor in attention.items()}),
        "settings of attention processors": _counted({name: settings(x) for name, x in attention.items()}),
    }


def _applied(layer: Any) -> str:
    if layer.disable_adapters:
        return "disabled"
    return f"{'fused ' if layer.merged else ''}{' + '.join(layer.merged_adapters or active(layer)) or 'none active'}"


def _scales(layer: Any) -> str:
    return " + ".join(f"{name} {value:.6g}" for name, value in getattr(layer, "scaling", {}).items())


def _sums(adapted: Iterable[nn.Module]) -> list[int]:
    # The first factors of LoRA are left out: they may be random as long as the second ones are zero.
    every = [pair for layer in adapted for pair in layer.named_parameters()]
    values = [x.detach() for name, x in every if "base_layer" not in name and "lora_A" not in name]
    sums = [bits(x) for x in values]
    return torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, added up, () int64: the same in any order of its numbers."""
    return x.contiguous().view(_INTEGERS[x.itemsize]).sum(dtype=torch.int64)


def _counted(texts: Mapping[str, str]) -> str:
    most = Counter(text for text in texts.values() if text).most_common(3)
    return f"{', '.join(f'{times} x {text}' for text, times in most)} ({_digest(texts)})" if most else "none"


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()


_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module; parameters and submodules are not settings


def settings(processor: Any) -> str:
    """Return a processor's public attributes with plain values as a text, which is equal on all ranks."""
    left_out = _OF_MODULES if isinstance(processor, nn.Module) else ()
    every = {name: _shown(value) for name, value in getattr(processor, "__dict__", {}).items() if name not in left_out}
    return ", ".join(f"{name} {text}" for name, text in every.items() if name[0] != "_" and text != "...")


def _shown(value: Any) -> str:
    """Return a text without addresses; "..." for what is neither a plain value nor a container."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_shown, value)))}}}"
    return str(value) if isinstance(value, _PLAIN) else "..."


Wanted = tuple[tuple[str, float], ...]
"""Names of LoRAs, in the order in which they are added, with their scales."""
Terms = Mapping[str, LoraTerm]
"""Path of a layer -> what a LoRA adds to it."""


def terms_of(module: nn.Module, name: str) -> dict[str, LoraTerm]:
    """Return what an adapter of peft adds to each layer; ValueError where that is more than a matrix to a weight."""
    terms = dict[str, LoraTerm]()
    for path, layer in layers(module):
        wrapper: Any = layer
        if name not in adapters_of(wrapper):
            continue
        base: Any = base_of(wrapper)
        reason = why_not_plain(wrapper, name)
        if type(base) is not nn.Linear or not base.weight.is_floating_point() or base.weight.itemsize < 2:
            reason = f"wraps a {type(base).__name__} of {base.weight.dtype}"
        if reason is not None:
            raise ValueError(f"got an adapter on {path} that {reason}, expected a plain LoRA of linear layers")
        terms[path] = term_of(wrapper, name)
    return terms


class Merging:
    """The LoRAs of a transformer, of which any are merged into its weights.

    module: the transformer; or a pipeline, if paths begin with the names of its transformers. terms: name of a LoRA ->
    what it adds. mesh: of all ranks, which keep the weights without LoRAs beside the merged ones, in one room for the
    layers of all LoRAs, so that others can be merged later; those that are stored in 8 bits or parked in memory of the
    host, which they share. None keeps nothing, for one switch.
    """

    def __init__(self, module: Any, terms: Mapping[str, Terms], mesh: Mesh | None = None) -> None:
        self._terms = terms
        paths = dict.fromkeys(path for of_lora in terms.values() for path in of_lora)
        self._layers: dict[str, Any] = {path: layer_at(module, path) for path in paths}
        self._owners = {path: _owner(module, path) for path in paths}
        self._sources, like = dict[str, Callable[[], Tensor]](), dict[str, Tensor]()
        self._kept = dict[str, tuple[Tensor, Tensor | None]]()
        for path in self._in_turns(paths):
            (owner, name), layer = self._owners[path], self._layers[path]
            bring(owner)
            weight = layer.weight.detach()
            like[path] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            source = weight.source if (eight := isinstance(weight, Weight8)) else None
            if source is None and mesh is not None:
                if eight:  # its file has these 8 bits alone
                    source, like[path] = partial(_in_place, owner, layer), weight
                elif (seat := seat_of(owner)) is not None:
                    source = partial(seat.original, f"{name}.weight")
            if source is not None:
                self._sources[path], weight = source, weight.new_empty(0)
            if mesh is not None:
                self._kept[path] = weight.clone(), None if layer.bias is None else layer.bias.detach().clone()
        if mesh is not None:
            self._sources = hold(like, self._sources, mesh)
        self.merged: Wanted | None = ()  # None after an error
        self._written: tuple[str, ...] = ()  # the LoRAs whose layers may not be as they were, also after an error

    def _in_turns(self, paths: Iterable[str]) -> list[str]:
        # the second transformer first: the next run begins with the other one
        return sorted(dict.fromkeys(paths), key=lambda path: path.partition(".")[0], reverse=True)

    @torch.no_grad()
    def switch(self, wanted: Wanted) -> bool:
        """Merge these LoRAs and no others; return whether a weight was written. ValueError for an unknown name.

        Every rank must call this alike. The device writes after what was queued before.
        """
        if unknown := [name for name, _ in wanted if name not in self._terms]:
            known = ", ".join(self._terms) or "none: the model was loaded without"
            raise ValueError(f"got the LoRA {unknown[0]}, expected one of {known}")
        names = tuple(dict.fromkeys(name for name, _ in wanted))
        if wanted == self.merged:
            return False
        self.merged, self._written = None, tuple(dict.fromkeys((*self._written, *names)))
        paths = self._in_turns(path for name in self._written for path in self._terms[name])
        coming = arriving([(self._layers[path].weight, x) for path in paths if (x := self._sources.get(path))])
        for path in paths:
            bring(self._owners[path][0])
            layer = self._layers[path]
            own, own_bias = self._kept.get(path, (layer.weight, layer.bias))
            terms = [(self._terms[name][path], scale) for name, scale in wanted if path in self._terms[name]]
            source = self._sources.get(path)
            own = own.to(layer.weight.device) if source is None else next(coming)
            weight, bias = with_terms(own, own_bias, terms) if terms else (own, None)
            layer.weight.copy_(weight)
            if source is not None and isinstance(layer.weight, Weight8):  # a GEMM may keep its dtype
                before = partial(_merged, source, own.device, terms) if terms else source
                layer.weight.came_from(None if isinstance(own, Weight8) else before, not terms)
            if own_bias is not None:
                layer.bias.copy_(own_bias if bias is None else bias)
        self.merged, self._written = wanted, names
        return True


def _owner(module: Any, path: str) -> tuple[nn.Module, str]:
    # the transformer of a layer, and the layer's path in it
    if isinstance(module, nn.Module):
        return module, path
    part, _, inner = path.partition(".")
    return getattr(module, part), inner


def _in_place(owner: nn.Module, layer: Any) -> Tensor:
    bring(owner)
    return layer.weight.detach()


def _merged(source: Callable[[], Tensor], device: torch.device, terms: Sequence[tuple[LoraTerm, float]]) -> Tensor:
    own = source().to(device)
    return with_terms(own, None, terms)[0].to(own.dtype)
