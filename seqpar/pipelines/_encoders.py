"""Text and image encoders of a pipeline: rank 0 alone holds them, and gives their results to stubs on other ranks.

A stub is of the encoder's class and has its config, dtype and device, so that every pipeline's own code goes on. Its
`forward` and `generate` return what rank 0's return: tensors by a broadcast, and how they lie in an output of
transformers as a letter. Caches of generation stay with rank 0; results have None in their place on all ranks.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.pipelines._naming import naming
from seqpar.ranks.inputs import CALL, agree, broadcast
from seqpar.ranks.letters import WHO
from seqpar.ranks.mesh import Mesh
from seqpar.ranks.watch import LostRankError
from seqpar.weights.parts import parts_of

NAMES = ("text_encoder", "image_encoder")  # how the names of such parts begin
METHODS = ("forward", "generate")
Outputs = Mapping[str, type]  # classes of outputs by name


@dataclass(frozen=True)
class Result:
    """How tensors make a result; without any field it is None.

    tensor: the shape and dtype of one. items: of a tuple, or of a list. fields: those of an output that are not None,
    of the class `output`.
    """

    tensor: tuple[tuple[int, ...], torch.dtype] | None = None
    items: tuple[Result, ...] | None = None
    is_list: bool = False
    output: str | None = None
    fields: dict[str, Result] | None = None

    def shapes(self) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Yield shape and dtype of each tensor, in the order in which `described` lists them."""
        if self.tensor is not None:
            yield self.tensor
        for inner in (*(self.items or ()), *(self.fields or {}).values()):
            yield from inner.shapes()


def described(value: Any, outputs: Outputs, tensors: list[Tensor]) -> Result:
    """Return how a result is made of tensors, which are added to a list; ValueError for what ranks do not share."""
    from transformers import Cache
    from transformers.utils.generic import ModelOutput

    if value is None or isinstance(value, Cache):
        return Result()
    if isinstance(value, Tensor):
        tensors.append(value)
        return Result(tensor=(tuple(value.shape), value.dtype))
    name = type(value).__name__
    if isinstance(value, ModelOutput) and outputs.get(name) is type(value):
        return Result(output=name, fields={key: described(one, outputs, tensors) for key, one in value.items()})
    if type(value) in (tuple, list):
        items = tuple(described(one, outputs, tensors) for one in value)
        return Result(items=items, is_list=isinstance(value, list))
    raise ValueError(f"got a {name} in the result of an encoder, expected tensors and outputs of transformers")


def restored(result: Result, outputs: Outputs, tensors: Iterator[Tensor]) -> Any:
    """Return the value that `described` was given; LostRankError for a class or a field that no rank can have sent."""
    if result.tensor is not None:
        return next(tensors)
    if result.items is not None:
        items = [restored(one, outputs, tensors) for one in result.items]
        return items if result.is_list else tuple(items)
    if result.output is None:
        return None
    kind, values = outputs.get(result.output), result.fields or {}
    if kind is None or not values.keys() <= {field.name for field in fields(kind)}:  # pyright: ignore[reportArgumentType]
        raise LostRankError(f"got an output {result.output:.60} of rank 0, expected one of transformers; {WHO}")
    return kind(**{name: restored(one, outputs, tensors) for name, one in values.items()})


def outputs_of(kind: type) -> Outputs:
    """Return the classes of outputs by name that the modules of an encoder's class know."""
    from transformers import modeling_outputs
    from transformers.utils.generic import ModelOutput

    modules = [modeling_outputs, *(sys.modules[each.__module__] for each in kind.__mro__)]
    known = (each for module in modules for each in vars(module).values())
    return {each.__name__: each for each in known if isinstance(each, type) and issubclass(each, ModelOutput)}


class SharedEncoder:
    """The calls of one encoder, which all ranks make together and rank 0 computes."""

    def __init__(self, mesh: Mesh, name: str, kind: type) -> None:
        self._mesh, self._name, self._outputs = mesh, name, outputs_of(kind)
        self._computes = False

    def put(self, encoder: nn.Module, own: Mapping[str, Callable[..., Any]]) -> None:
        """Let methods of an encoder, or of a stub, return rank 0's results. own: the methods, by name."""
        for name, method in own.items():
            setattr(encoder, name, self._shared(name, method))

    def refuse(self, attribute: str) -> None:
        """Raise the same ValueError on all ranks, because one of them reads a part that only rank 0 has."""
        agree(self._mesh, {CALL: f"reads {self._name}.{attribute}, which only rank 0 has"})

    def _shared(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._computes:  # `generate` calls `forward`
                return method(*args, **kwargs)
            agree(self._mesh, {CALL: f"calls {self._name}.{name}"})
            return self._given(lambda: method(*args, **kwargs))

        return called

    def _given(self, call: Callable[[], Any]) -> Any:
        """Return the result of rank 0's call on every rank; if it fails, raise one error on all."""
        tensors = list[Tensor]()

        def work() -> Result:
            self._computes = True
            try:
                with failing(self._name):
                    return described(call(), self._outputs, tensors)
            finally:
                self._computes = False

        result = self._mesh.of_rank_0(work, Result)
        if not self._mesh.is_main:
            tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in result.shapes()]
        everyones = broadcast(self._mesh, {str(number): x for number, x in enumerate(tensors)})
        return restored(result, self._outputs, iter(tensors if self._mesh.is_main else everyones.values()))


def stub(
    kind: Any, config: Any, like: tuple[torch.dtype, Sequence[str]], shared: SharedEncoder, device: torch.device
) -> Any:
    """Return an encoder without weights, of a class that differs from `kind` only in what it says of missing parts.

    like: rank 0's dtype, and the names of the parts that it has.
    """
    dtype, parts = like

    def missing(self: Any, attribute: str) -> Any:
        if attribute in parts:
            shared.refuse(attribute)
        return kind.__getattr__(self, attribute)

    module: Any = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, "__getattr__": missing}))
    nn.Module.__init__(module)
    module.config = config
    module.register_parameter("none", nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False))
    shared.put(module, {name: getattr(kind, name) for name in METHODS if hasattr(kind, name)})
    return module.eval()


def load_encoders(
    pipeline: Any, folder: Path, index: Mapping[str, Any], dtype: torch.dtype, mesh: Mesh, what: str
) -> dict[str, Any]:
    """Return encoders on rank 0 and stubs on other ranks, by the names of their parts.

    Those of which the code of the class `pipeline` names layers are left out, after a line that says so, and all of
    them where one rank computes alone. what: begins an error's message. Every rank must call this at the same time.
    """
    if mesh.world.size == 1:
        return {}
    kinds = mesh.together(lambda: _kinds(folder, index))
    agree(mesh, {"the encoders of the folder": [*kinds]})
    encoders, likes = _of_rank_0(kinds, folder, dtype, mesh, what)

    def configs() -> dict[str, Any]:
        with naming(what):
            return {name: kind.config_class.from_pretrained(folder / name) for name, kind in kinds.items()}

    for name, config in mesh.together(configs).items():
        kind, shared = kinds[name], SharedEncoder(mesh, name, kinds[name])
        if layer := layer_named(pipeline, likes[name][1]):
            encoders.pop(name, None)
            if mesh.is_main:
                print(f"seqpar: every rank loads {name}, because {pipeline.__name__} reads {layer}", flush=True)
        elif mesh.is_main:
            shared.put(encoders[name], {each: getattr(encoders[name], each) for each in METHODS if hasattr(kind, each)})
        else:
            encoders[name] = stub(kind, config, likes[name], shared, mesh.device)
    return encoders


def _of_rank_0(
    kinds: Mapping[str, Any], folder: Path, dtype: torch.dtype, mesh: Mesh, what: str
) -> tuple[dict[str, Any], dict[str, tuple[torch.dtype, list[str]]]]:
    """Return the encoders, on rank 0 alone; and on every rank the dtype of each, and the names of its layers."""
    encoders = dict[str, Any]()

    def load() -> dict[str, tuple[torch.dtype, list[str]]]:
        with naming(what):
            for name, kind in kinds.items():
                device = {"": mesh.device}  # tensor by tensor, so that the host never holds an encoder
                encoders[name] = kind.from_pretrained(folder / name, dtype=dtype, device_map=device)
        return {name: (each.dtype, [part for part, _ in each.named_children()]) for name, each in encoders.items()}

    likes = mesh.of_rank_0(load, dict[str, tuple[torch.dtype, list[str]]])
    return encoders, likes


def layer_named(pipeline: Any, parts: Sequence[str]) -> str | None:
    """Return a layer of an encoder that the code of a pipeline's class names, or None.

    parts: the names of the layers in an encoder. A stub cannot stand for a layer, as for one with a hook.
    """
    layers = "|".join(map(re.escape, parts))
    code = inspect.getsource(sys.modules[pipeline.__module__])
    match = re.search(rf"\b({'|'.join(NAMES)})(_\d)?\.({layers})\b", code)
    return None if match is None else match[0]


def _kinds(folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of each encoder of transformers that has a folder of its own, without programs beside it."""
    import transformers  # takes seconds, which models without text encoders do not need

    kinds = {
        name: getattr(transformers, kind, None)
        for name, (library, kind) in parts_of(index)
        if library == "transformers"
    }
    return {
        name: kind
        for name, kind in kinds.items()
        if name.startswith(NAMES) and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if (folder / name).is_dir() and not any((folder / name).glob("*.py"))
    }


def failing(name: str) -> Any:
    """Return a context in which an encoder that fails says so in one message: a value of its config may be the reason.

    name: that of the pipeline's part.
    """
    return naming(f"got a {name} that fails on a prompt")


def name_encoders(pipe: Any, shared: Mapping[str, Any]) -> None:
    """Let the text encoders of a pipeline that are not shared among ranks say in one message that they fail."""

    def named(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            with failing(name):
                return forward(*args, **kwargs)

        return called

    for name in pipe.components:
        encoder = getattr(pipe, name, None) if name.startswith("text_encoder") and name not in shared else None
        if encoder is not None:
            encoder.forward = named(name, encoder.forward)


def forget_encoders(pipe: Any) -> None:
    """Drop a pipeline's text encoders when a transformer is called first: they are used once, before it.

    The pipeline can make no other picture of a text after that.
    """
    from seqpar.adapter.parallelize import (
        transformers_of,  # takes seconds, which models with a loop of ours do not need
    )

    names = [name for name in pipe.components if name.startswith("text_encoder")]
    handles = []

    def forget(*_: object) -> None:
        for handle in handles:
            handle.remove()
        for name in names:
            setattr(pipe, name, None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    handles += [module.register_forward_pre_hook(forget) for module in transformers_of(pipe).values()]
