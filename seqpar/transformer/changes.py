"""Notices what users change on a transformer between two calls.

peft, diffusers and users' code change modules in many places, and nothing announces a change. Every call therefore
reads each entry of one list, by C loops over objects that were collected at the last scan of the module, and compares
it with its value then. For FLUX.1 (1279 modules) that takes 49 us of a slow cloud CPU; adapters on every linear layer
add settings, scales and values.

Single weights, buffers and plain attributes are no entries: reading all of them would take longer than everything else.
`seqpar.refresh` makes the next call scan the whole module again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter, eq
from typing import Any

from torch import Tensor, nn

from seqpar.kernels.weight8 import read_as_tensors
from seqpar.transformer import lora as adapters
from seqpar.transformer.foreign import ForeignCode, look
from seqpar.transformer.internals import REGISTRY, registered_hooks, torch_hooks

REFRESHES = "_seqpar_refreshes"  # the attribute of a transformer that counts the calls of `seqpar.refresh`
_settings = attrgetter("_disable_adapters", "_active_adapter", "merged_adapters")
_version = attrgetter("_version")


class _Entry:
    # something that every call compares with what it was first

    def __init__(self, read: Callable[[], object], equal: Callable[[Any, Any], bool] = eq) -> None:
        self._read, self._before, self._equal = read, _copied(read()), equal

    def changed(self) -> bool:
        try:
            return not self._equal(self._read(), self._before)
        except (RuntimeError, ValueError, KeyError):  # an array is in place of a number, a tensor without an address
            return True  # in place of one that has it, or a weight is gone


class Changes:
    """Counts the changes of a module: layers, hooks, forwards, adapters, attention processors, moves of its weights.

    Weights written in place are no change: a computation on the same addresses reads what was written. `values` changes
    with them; it is for results that are computed later.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.counted = module, 0
        self._texts: tuple[int, dict[str, str]] = -1, {}
        self._foreign: tuple[int, ForeignCode] = -1, ForeignCode()
        self.accept()

    def count(self) -> int:
        """Return the number of changes so far; `counted` is that number without another comparison."""
        if any(entry.changed() for entry in self._entries):
            self.accept()
            self.counted += 1
        return self.counted

    def accept(self) -> None:
        """Scan the whole module, which takes milliseconds, and count it as unchanged."""
        own = [module for _, module in adapters.without_adapters(self._module)]
        wrapped = [layer for _, layer in adapters.layers(self._module)]
        parts = [part for layer in wrapped for part in layer.modules()]
        modules = list({id(module): module for module in (*own, *parts)}.values())
        self._entries = (
            *_of_modules(self._module, own, modules),
            *_of_processors([module for module in own if hasattr(module, "processor")]),
            *(_of_adapters(wrapped) if wrapped else ()),
        )
        self._tensors = [x for module in modules for x in module._parameters.values() if x is not None]
        self._buffers = [module._buffers for module in modules if module._buffers]

    def texts(self) -> dict[str, str]:
        """Return what ranks compare (`adapters.texts`) as it was at the last `count`; it is computed once for each."""
        if self._texts[0] != self.counted:
            extra = {"rows": self.foreign().coupled or "apart"}
            self._texts = self.counted, {**adapters.texts(self._module, self.foreign().hooks), **extra}
        return self._texts[1]

    def foreign(self) -> ForeignCode:
        """Return third-party code on the module, as it was at the last `count`."""
        if self._foreign[0] != self.counted:
            self._foreign = self.counted, look(self._module)
        return self._foreign[1]

    def values(self) -> tuple[object, ...]:
        """Return what differs if weights were written in place since the last call, or buffers written or replaced."""
        buffers = [x for held in self._buffers for x in held.values() if x is not None]
        with read_as_tensors():
            written = [x for x in (*self._tensors, *buffers) if not x.is_inference()]
            return (*map(id, buffers), *map(_version, written))


# The entries ---------------------------------------------------------------------------------------------------


def _copied(value: Any) -> Any:
    # of nested containers, with the same objects in them; tensors as what is equal to them alone
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_copied, value)] if isinstance(value, list) else tuple(map(_copied, value))
    if isinstance(value, set):
        return set(value)
    return _Held(value) if isinstance(value, Tensor) else value


class _Held:
    # a tensor that is equal to nothing else, whatever its values are
    __hash__ = object.__hash__

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return self._tensor is other


def _of_modules(root: nn.Module, own: list[nn.Module], modules: list[nn.Module]) -> Iterator[_Entry]:
    # own: those of the model, without the parts of adapters' layers
    attributes, children = [vars(module) for module in modules], [part._modules for part in own if part._modules]
    forwards = [names for names in attributes[1:] if "forward" in names]
    registries = [names[REGISTRY] for names in attributes if REGISTRY in names]
    kinds, config = {type(module) for module in modules}, vars(root)
    placed = [part for part in own if isinstance(part, nn.ModuleList) or hasattr(part, "processor")]
    placed += [child for part in placed if isinstance(part, nn.ModuleList) for child in part.children()]
    yield _Entry(lambda: (list(config.get("peft_config", ())), config.get(REFRESHES)))
    yield _Entry(lambda: children)
    yield _Entry(lambda: list(map(len, attributes)))  # a forward or a registry of hooks was added
    yield _Entry(_TorchHooks(modules[1:]))
    yield _Entry(lambda: [names.get("forward") for names in forwards])
    yield _Entry(lambda: [list(registry.hooks.values()) for registry in registries])
    yield _Entry(lambda: [kind.forward for kind in kinds])
    yield _Entry(lambda: [*map(type, placed)])  # a class may be assigned
    yield _Entry(_Addresses(root))


class _TorchHooks:
    # Reads the hooks of torch on modules: only where there are some, as long as none was registered anywhere.

    def __init__(self, modules: list[nn.Module]) -> None:
        self._all = [hooks for module in modules for hooks in torch_hooks(module)]
        self._registered, self._some = -1, list[Mapping[int, Any]]()

    def __call__(self) -> list[tuple[int, ...]]:
        if self._registered != (registered := registered_hooks()):
            self._registered, self._some = registered, [hooks for hooks in self._all if hooks]
        return [tuple(hooks) for hooks in self._some if hooks]


class _Addresses:
    # Reads where the first weight of each child of a module, and of each member of its lists, lies in memory. All
    # weights move, or are replaced, together: by `to`, or by a state dict that is assigned.

    def __init__(self, root: nn.Module) -> None:
        lists = (child if isinstance(child, nn.ModuleList) else (child,) for child in root.children())
        self._plain, self._others = list[tuple[dict[str, Any], str]](), list[tuple[dict[str, Any], str]]()
        for held, name in chain.from_iterable(islice(_weights(child), 1) for children in lists for child in children):
            (self._plain if type(held[name]) is nn.Parameter else self._others).append((held, name))

    def __call__(self) -> list[int]:
        plain = [held[name].data_ptr() for held, name in self._plain]
        # tensors of other types, as quantised weights have, need not have an address
        return plain + [id(held[name]) for held, name in self._others]


def _weights(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    # the parameters of a module by the attributes in which they are held, and their names there
    for part in module.modules():
        yield from ((part._parameters, name) for name, weight in part._parameters.items() if weight is not None)


def _of_processors(attention: list[Any]) -> Iterator[_Entry]:
    # which processors there are, what they compute, and their settings
    modules, processors = list(map(vars, attention)), [module.processor for module in attention]
    settings = [vars(processor) for processor in processors if hasattr(processor, "__dict__")]
    kinds = {base for processor in processors for base in type(processor).__mro__}
    yield _Entry(lambda: [names.get("processor") for names in modules])  # a processor may be among the children, too
    yield _Entry(lambda: [vars(kind).get("__call__") for kind in kinds])
    yield _Entry(lambda: settings)  # diffusers' `set_ip_adapter_scale` changes them in place


def _of_adapters(layers: list[nn.Module]) -> Iterator[_Entry]:
    # which adapters are active or fused, their scales, and writes to their values
    scales = [x for layer in layers if isinstance(x := getattr(layer, "scaling", None), dict)]
    weights = [x for layer in layers for x in layer.parameters() if not x.is_inference()]
    yield _Entry(lambda: list(map(_settings, layers)))
    yield _Entry(lambda: list(map(_version, weights)))
    yield _Entry(lambda: scales, _close)


def _close(scales: list[dict[str, float]], before: list[dict[str, float]]) -> bool:
    # up to rounding: diffusers multiplies and divides them in a call
    if scales == before:
        return True
    if list(map(dict.keys, scales)) != list(map(dict.keys, before)):
        return False
    pairs = ((a, other[name]) for scale, other in zip(scales, before, strict=True) for name, a in scale.items())
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in pairs)
