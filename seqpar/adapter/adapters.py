"""Notices changes of a module's weights, adapters (LoRA and its kin) and attention processors, and merges adapters.

peft wraps linear layers in a diffusers module by layers that hold low-rank factors, scales and flags. It, diffusers and
a user's own code change them and the processors in many places, so nothing announces a change: `Watch` compares what a
call depends on with what it saw before. That takes some hundred microseconds of the host for a FLUX.1 (20 to 50 of them
for its processors), and about a millisecond with an adapter on every linear layer; the GPU computes meanwhile. peft is
imported only by those who use it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.adapter import processors
from seqpar.adapter.foreign import Foreign, hooks_of, look

_settings = attrgetter("_disable_adapters", "_active_adapter", "merged_adapters")
_versions = attrgetter("_version")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_adapter(module: nn.Module) -> bool:
    """Return whether this is one of peft's layers around a layer of the model."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # nobody has wrapped a layer before peft was imported
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


@dataclass
class _Seen:
    """What a watch compares, and what it found there last."""

    structure: list[dict[str, nn.Module | None]]
    children: list[nn.Module | None]
    parameters: Sequence[dict[str, Any]]
    layers: list[Any]
    adapted: list[Tensor]
    scales: Sequence[dict[str, float]]
    addresses: list[int] = field(default_factory=list)
    settings: list[tuple[Any, ...]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    scaling: list[float] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    hooks: list[Mapping[int, Any]] = field(default_factory=list)
    named: list[dict[str, Any]] = field(default_factory=list)
    registries: list[Any] = field(default_factory=list)
    hooked: list[object] = field(default_factory=list)
    kinds: set[type] = field(default_factory=set)
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[dict[str, Any]] = field(default_factory=list)
    seats: list[dict[str, Any]] = field(default_factory=list)
    processors: list[Any] = field(default_factory=list)
    seated: list[Any] = field(default_factory=list)
    attributes: list[object] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)


class Watch:
    """Counts the changes of a module: layers, hooks, addresses of weights, adapters and attention processors.

    Adapters are compared with their scales and values, processors with their attributes, such as an IP-adapter's scale.

    In-place changes of weights that no adapter wraps are not changes: a computation on the same addresses reads them.
    Writing to a parameter's `.data` leaves no trace; peft does so when it fuses, which its flags tell.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._seen, self._count = module, None, 0
        self._told: tuple[int, dict[str, str]] = -1, {}
        self._foreign: tuple[int, Foreign] = -1, Foreign()

    def count(self) -> int:
        """Return a number that is larger than at the last call if and only if something changed since then."""
        seen = self._seen
        if seen is None or not self._unchanged(seen):
            self._seen, self._count = self._look(), self._count + 1
        return self._count

    def told(self) -> dict[str, str]:
        """Return `told` of the module at the last `count`; it is computed once for each."""
        if self._told[0] != self._count:
            self._told = self._count, {**told(self._module), "rows": self.foreign().coupled or "apart"}
        return self._told[1]

    def foreign(self) -> Foreign:
        """Return what others have put onto the module, as it was at the last `count`."""
        if self._foreign[0] != self._count:
            self._foreign = self._count, look(self._module)
        return self._foreign[1]

    def values(self) -> tuple[object, ...]:
        """Return what differs if weights were written in place since the last call, or buffers written or replaced."""
        if self._seen is None:
            return ()
        buffers = [x for each in self._seen.buffers for x in each.values() if x is not None]
        known = [x for x in (*self._seen.tensors, *buffers) if not x.is_inference()]
        return (*map(id, buffers), *map(_versions, known))

    def _unchanged(self, seen: _Seen) -> bool:
        return (
            _children(seen) == seen.children
            and self._config() == seen.config
            and _addresses(seen) == seen.addresses
            and _hooked(seen) == seen.hooked
            and _seated(seen) == seen.seated
            and list(map(processors.attributes, seen.processors)) == seen.attributes
            and list(map(_settings, seen.layers)) == seen.settings
            and list(map(_versions, seen.adapted)) == seen.versions
            and _close(list(chain.from_iterable(map(dict.values, seen.scales))), seen.scaling)
        )

    def _config(self) -> list[str]:
        return list(getattr(self._module, "peft_config", ()))

    def _look(self) -> _Seen:
        """Traverse the module; adapters' own submodules are looked at by their scales and parameters only."""
        own = [module for _, module in without_adapters(self._module)]
        found = [layer for _, layer in layers(self._module)]
        inside = [part for layer in found for part in layer.modules()]
        held = list({id(module): module for module in (*own, *inside)}.values())
        below = held[1:]  # without the transformer itself
        seen = _Seen(
            structure=[module._modules for module in own if module._modules],
            children=[],
            parameters=[module._parameters for module in held if module._parameters],
            layers=found,
            adapted=[x for layer in found for x in layer.parameters() if not x.is_inference()],
            scales=[x for layer in found if isinstance(x := getattr(layer, "scaling", None), dict)],
            config=self._config(),
            hooks=[hooks for module in below for hooks in (module._forward_hooks, module._forward_pre_hooks)],
        )
        seen.named = [vars(module) for module in below]
        seen.kinds = {type(module) for module in held}
        seen.tensors = [x for module in held for x in module._parameters.values() if x is not None]
        seen.buffers = [module._buffers for module in held if module._buffers]
        seen.registries = [names["_diffusers_hook"] for names in seen.named if "_diffusers_hook" in names]
        seen.hooked = _hooked(seen)
        _look_at_processors(seen, [module for module in own if hasattr(module, "processor")])
        seen.children, seen.addresses = _children(seen), _addresses(seen)
        seen.settings = [copy.deepcopy(_settings(layer)) for layer in found]
        seen.versions = [x._version for x in seen.adapted]
        seen.scaling = list(chain.from_iterable(map(dict.values, seen.scales)))
        return seen


def _look_at_processors(seen: _Seen, modules: list[Any]) -> None:
    seen.seats, seen.processors = [vars(module) for module in modules], [module.processor for module in modules]
    seen.seated, seen.attributes = _seated(seen), list(map(processors.attributes, seen.processors))
    seen.kept = [[*getattr(one, "__dict__", {}).values()] for one in seen.processors]  # their addresses stay theirs


def _children(seen: _Seen) -> list[nn.Module | None]:
    return list(chain.from_iterable(map(dict.values, seen.structure)))


def _addresses(seen: _Seen) -> list[int]:
    values = chain.from_iterable(map(dict.values, seen.parameters))
    # tensors of other types, as quantised weights have, need not have an address
    return [x.data_ptr() if type(x) is nn.Parameter else id(x) for x in values if x is not None]


def _hooked(seen: _Seen) -> list[object]:
    """Return the submodules' hooks of torch, by their numbers, forwards that were replaced, and hooks of diffusers.

    diffusers may remove one without a change of the module's forward: that of a hook around it.
    """
    theirs = chain.from_iterable(registry.hooks.values() for registry in seen.registries)
    forwards = (*(names.get("forward") for names in seen.named), *(kind.forward for kind in seen.kinds))
    return [*map(tuple, filter(None, seen.hooks)), *forwards, *theirs]


def _seated(seen: _Seen) -> list[Any]:
    """Return the processors of attention modules; those that are modules themselves are among the children."""
    return [names.get("processor") for names in seen.seats]


def _close(these: list[float], those: list[float]) -> bool:
    """Return whether scales are equal up to rounding; diffusers multiplies and divides them in a call."""
    if these == those:
        return True
    return len(these) == len(those) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(these, those, strict=True)
    )


# Merging -------------------------------------------------------------------------------------------------------


def active(layer: nn.Module) -> tuple[str, ...]:
    """Return the adapters that a layer of peft applies beside its base layer; fused ones are in the weights already."""
    made: Any = layer
    if not is_adapter(layer) or made.disable_adapters or made.merged:
        return ()
    known = made._get_available_adapters()
    return tuple(name for name in made.active_adapters if name in known)


def why_not_merge(layer: nn.Module) -> str | None:
    """Return why the active adapters of a layer cannot be merged into its weight, or None."""
    made: Any = layer
    tuner = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
    kind = type(made).__module__.removeprefix("peft.tuners.")
    if not isinstance(made.get_base_layer(), nn.Linear) or made.get_base_layer() is not made.base_layer:
        return f"an adapter ({kind}) wraps a {type(made.base_layer).__name__}, which is no linear layer"
    if type(made).merge is tuner.merge:
        return f"adapters of the type {kind} cannot be merged into a weight"
    variants = getattr(made, "lora_variant", {})
    for name in active(made):
        if name in variants and not made.use_dora.get(name):
            return f"adapter {name} is a {type(variants[name]).__name__}, which changes more than a weight"
    return None


def merged(layer: nn.Module, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a wrapped linear layer with its active adapters merged, in fp32 (fp64 for fp64).

    The bias is None if the adapters do not change it. scale: multiplies the scales of the active adapters, as
    diffusers' `joint_attention_kwargs={"scale": s}` does.
    """
    made: Any = layer
    base = made.get_base_layer()
    wide = torch.promote_types(base.weight.dtype, torch.float32)
    if not _is_plain_lora(made):
        made = copy.deepcopy(made).to(wide)  # peft merges into this copy; the layer itself stays as it is
        if hasattr(made, "scale_layer"):
            made.scale_layer(scale)
        made.merge(adapter_names=list(active(made)))
        base = made.get_base_layer()
        return base.weight.data, None if base.bias is None else base.bias.data
    weight, bias = base.weight.to(wide), None
    for name in active(made):
        a, b, factor = made.lora_A[name], made.lora_B[name], made.scaling[name] * scale
        weight = torch.addmm(weight, b.weight.to(wide), a.weight.to(wide), alpha=factor)
        if b.bias is not None:
            bias = (base.bias.to(wide) if bias is None else bias) + factor * b.bias.to(wide)
    return weight, bias


def _is_plain_lora(layer: Any) -> bool:
    lora = sys.modules.get("peft.tuners.lora.layer")
    plain = lora is not None and type(layer) is lora.Linear and not layer.fan_in_fan_out
    return plain and not any(name in layer.lora_variant for name in active(layer))


# The same on all ranks -----------------------------------------------------------------------------------------


def told(module: nn.Module) -> dict[str, str]:
    """Return what must be equal on all ranks: the module's adapters and attention processors, as texts by their names.

    The texts are equal on ranks that made the same calls. This waits for the device.
    """
    adapted = dict(layers(module))
    seated: dict[str, Any] = {name: one for name, one in without_adapters(module) if hasattr(one, "processor")}
    return {
        "adapters": _counted({name: _applied(layer) for name, layer in adapted.items()}),
        "scales of adapters": _counted({name: _scales(layer) for name, layer in adapted.items()}),
        "values of adapters": _digest(_sums(adapted.values())),
        "hooks": _counted({str(one): one.kind for one in hooks_of(module)}),
        "attention processors": _counted({name: type(one.processor).__name__ for name, one in seated.items()}),
        "settings of attention processors": _counted(
            {name: processors.settings(one.processor) for name, one in seated.items()}
        ),
    }


def _applied(layer: Any) -> str:
    """Return the names of the adapters that a layer applies."""
    if layer.disable_adapters:
        return "disabled"
    return f"{'fused ' if layer.merged else ''}{' + '.join(layer.merged_adapters or active(layer)) or 'none active'}"


def _scales(layer: Any) -> str:
    scaling: Mapping[str, float] = getattr(layer, "scaling", {})
    return " + ".join(f"{name} {value:.6g}" for name, value in scaling.items())


def _sums(adapted: Iterable[nn.Module]) -> list[int]:
    """Return a sum of the bits of each tensor of adapters, in integers, whose sum is the same in any order.

    The first factors of LoRA are left out: they may be random as long as the second ones are zero.
    """
    every = [pair for layer in adapted for pair in layer.named_parameters()]
    found = [x.detach() for name, x in every if "base_layer" not in name and "lora_A" not in name]
    sums = [x.contiguous().view(_INTEGERS[x.itemsize]).sum(dtype=torch.int64) for x in found]
    return torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []


def _counted(found: Mapping[str, str]) -> str:
    """Return place -> text as one text: how often the most frequent ones are there, and a digest of all."""
    most = Counter(text for text in found.values() if text).most_common(3)
    return f"{', '.join(f'{times} x {text}' for text, times in most)} ({_digest(found)})" if most else "none"


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()
