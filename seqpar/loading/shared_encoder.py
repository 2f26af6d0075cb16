"""One encoder that all ranks call together: rank 0 alone computes, and gives its results to stubs on other ranks.

Results are tensors, sent by a broadcast, and how they lie in an output of transformers, sent as a message. Caches of
generation stay with rank 0; results have None in their place on all ranks. Results can also be kept, so that a stub on
every rank gives them again after the encoder is freed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.loading.errors import context
from seqpar.mesh.errors import WHO
from seqpar.mesh.inputs import CALL, agree, broadcast
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.watch import LostRankError

METHODS = ("forward", "generate")
INNER = "model"  # an encoder without its head, which MiniMax-H3 calls
Outputs = Mapping[str, type]  # classes of outputs by name


@dataclass(frozen=True)
class EncoderResult:
    """How tensors make a result; without any field it is None.

    tensor: the shape and dtype of one. items: of a tuple, or of a list. fields: those of an output that are not None,
    of the class `output`.
    """

    tensor: tuple[tuple[int, ...], torch.dtype] | None = None
    items: tuple[EncoderResult, ...] | None = None
    is_list: bool = False
    output: str | None = None
    fields: dict[str, EncoderResult] | None = None

    def shapes(self) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Yield shape and dtype of each tensor, in the order in which `described` lists them."""
        if self.tensor is not None:
            yield self.tensor
        for inner in (*(self.items or ()), *(self.fields or {}).values()):
            yield from inner.shapes()


def described(value: Any, outputs: Outputs, tensors: list[Tensor]) -> EncoderResult:
    """Return how a result is made of tensors, which are added to a list; ValueError for what ranks do not share."""
    from transformers import Cache
    from transformers.utils.generic import ModelOutput

    if value is None or isinstance(value, Cache):
        return EncoderResult()
    if isinstance(value, Tensor):
        tensors.append(value)
        return EncoderResult(tensor=(tuple(value.shape), value.dtype))
    name = type(value).__name__
    if isinstance(value, ModelOutput) and outputs.get(name) is type(value):
        return EncoderResult(output=name, fields={key: described(one, outputs, tensors) for key, one in value.items()})
    if type(value) in (tuple, list):
        items = tuple(described(one, outputs, tensors) for one in value)
        return EncoderResult(items=items, is_list=isinstance(value, list))
    raise ValueError(f"got a {name} in the result of an encoder, expected tensors and outputs of transformers")


def restored(result: EncoderResult, outputs: Outputs, tensors: Iterator[Tensor]) -> Any:
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


@dataclass(frozen=True)
class EncoderCall:
    """One call of an encoder: its tensors, how its result lies, and a copy of the result's tensors."""

    method: str
    inputs: Sequence[Tensor]
    result: EncoderResult
    tensors: Sequence[Tensor]


class SharedEncoder:
    """One encoder: its calls, which all ranks make together and rank 0 computes.

    like: rank 0's dtype, and the names of the parts that it has. own: the encoder, on rank 0 alone. module: what stands
    in the pipeline: on rank 0 the encoder itself, on other ranks a stub without weights. meets: whether a stub that
    lacks a part compares the ranks' calls, which rank 0 meets in its next call; not where an error of one rank is
    shared anyway.
    """

    def __init__(
        self, mesh: Mesh, name: str, kind: Any, config: Any, like: tuple[torch.dtype, Sequence[str]], own: Any
    ) -> None:
        self._mesh, self._name, self._kind, self._config, self._like = mesh, name, kind, config, like
        self._outputs = outputs_of(kind)
        self._computes, self.meets = False, True
        self._kept: list[EncoderCall] | None = None
        self._next: int | None = None
        self.module = self._stub() if own is None else self._shared(own, own)

    def keep(self) -> None:
        self._kept = []

    def end(self) -> None:
        """Put a stub in the encoder's place on every rank, which gives the results of kept calls again."""
        self.module, self._next = self._stub(), 0

    def _stub(self) -> Any:
        """Return an encoder without weights, of a class that differs only in what it says of missing parts."""
        kind, (dtype, parts) = self._kind, self._like

        def empty(kind: Any, prefix: str = "") -> Any:
            def missing(module: Any, attribute: str) -> Any:
                if attribute != INNER and prefix + attribute in parts:
                    where = "only rank 0 has" if self._next is None else "was freed"
                    if self.meets:
                        agree(self._mesh, {CALL: f"reads {self._name}.{prefix}{attribute}, which {where}"})
                    raise ValueError(f"got a pipeline that reads {self._name}.{prefix}{attribute}, which {where}")
                return kind.__getattr__(module, attribute)

            names = {"__module__": kind.__module__, "__getattr__": missing}
            module: Any = object.__new__(type(kind.__name__, (kind,), names))
            nn.Module.__init__(module)
            none = torch.empty(0, dtype=dtype, device=self._mesh.device)
            module.register_parameter("none", nn.Parameter(none, requires_grad=False))
            return module

        module = empty(kind)
        module.config = self._config
        if INNER in parts:
            module.add_module(INNER, empty(nn.Module, f"{INNER}."))
        return self._shared(module, kind).eval()

    def _shared(self, module: Any, own: Any) -> Any:
        for name in METHODS:
            if hasattr(own, name):
                setattr(module, name, self._method(name, getattr(own, name)))
        inner = dict(module.named_children()).get(INNER)
        if inner is not None:
            inner.forward = self._method(f"{INNER}.forward", inner.forward)
        return module

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._computes:  # `generate` calls `forward`
                return method(*args, **kwargs)
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if self._next is not None:
                return self._again(name, inputs)
            agree(self._mesh, {CALL: f"calls {self._name}.{name}"})
            result, tensors = self._given(lambda: method(*args, **kwargs))
            if self._kept is not None:  # copies, because a pipeline may change its arguments
                self._kept.append(EncoderCall(name, [x.clone() for x in inputs], result, [x.clone() for x in tensors]))
            return restored(result, self._outputs, iter(tensors))

        return called

    def _given(self, call: Callable[[], Any]) -> tuple[EncoderResult, list[Tensor]]:
        """Return how the result of rank 0's call lies, and its tensors, on every rank; raise one error on all."""
        tensors = list[Tensor]()

        def work() -> EncoderResult:
            self._computes = True
            try:
                with failing(self._name):
                    return described(call(), self._outputs, tensors)
            finally:
                self._computes = False

        result = self._mesh.on_rank_0(work, EncoderResult)
        if not self._mesh.is_main:
            tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in result.shapes()]
        everyones = broadcast(self._mesh, {str(number): x for number, x in enumerate(tensors)})
        return result, tensors if self._mesh.is_main else [*everyones.values()]

    def _again(self, name: str, inputs: Sequence[Tensor]) -> Any:
        """Return the kept result of the next call of these inputs; after the last comes the first. Else ValueError.

        Other calls are passed over: several texts may be kept, and be used in another order.
        """
        kept, first = self._kept or [], self._next or 0
        order = [*range(first, len(kept)), *range(first)]
        at = next((at for at in order if kept[at].method == name and _equal(kept[at].inputs, inputs)), None)
        if at is None:
            raise ValueError(
                f"got a call of {self._name}.{name} with another text than at first, expected the same texts: the "
                f"encoder was freed; load the pipeline by seqpar.load"
            )
        self._next = (at + 1) % len(kept)
        return restored(kept[at].result, self._outputs, iter([x.clone() for x in kept[at].tensors]))


def _equal(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def failing(name: str) -> Any:
    """Name the encoder, a part of a pipeline, in the error when it fails: a value of its config may be the reason."""
    return context(f"got a {name} that fails on a prompt")
