"""The native body: FLUX.1 computed by `seqpar.models.flux` on the weights of diffusers' module, for its pipelines.

It takes diffusers' arguments (tokens, text, pooled text, timestep, guidance and the pipeline's own position ids, as
Kontext, fill and image-to-image pipelines make them), splits the tokens of both streams and returns complete outputs.
The module keeps its weights (`adopt.py`). Active adapters are merged into copies of the weights that they touch
(`adapters.py`): a step then costs the same as without adapters, where low-rank products would add three small kernels
for each layer; dropping the copies restores the bits. The copies take as much memory as the weights they replace.
When it wins: always, by its fused kernels; what it cannot take is computed by the generic body, after a line that says
why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from seqpar.adapter import adapters, adopt, changes, generic, plain, seats
from seqpar.adapter.body import Inside
from seqpar.adapter.cuts import Cuts, GatherTokens
from seqpar.adapter.foreign import Foreign, look
from seqpar.adapter.forward import Ranks
from seqpar.engine.share import Inputs, Share
from seqpar.models import flux
from seqpar.planner.plan import Choice, Plan
from seqpar.ranks.mesh import Mesh
from seqpar.types.keys import KeyMap
from seqpar.types.streams import Split

NEEDED = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")


def build(module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts | None = None) -> Native:
    """Return the body of a module for which `why_not` returns None; its weights are taken over at the first call.

    cuts: where the generic body splits tokens, which computes what the native model cannot take; None takes our table.
    """
    return Native(module, mesh, plan, cuts)


def knows(module: nn.Module) -> bool:
    """Return whether there is a native model for transformers of this kind, if also not for this one."""
    return isinstance(module, FluxTransformer2DModel)


def why_not(module: nn.Module) -> str | None:
    """Return why the native model cannot take over a diffusers transformer, or None if it can."""
    if type(module) is not FluxTransformer2DModel:
        return f"there is no native model for {type(module).__name__}"
    places = adopt.places(module)
    return _why_not_now(module, places) or _why_not_built(module, places)


def _why_not_now(module: nn.Module, found: Mapping[str, adopt.Holder]) -> str | None:
    """Return the first reason in what may change between calls."""
    every = itertools.chain(_of_layers(found), _of_adapters(module), _of_hooks(module), _of_settings(module))
    return next(every, None)


def _why_not_built(module: nn.Module, found: Mapping[str, adopt.Holder]) -> str | None:
    """Return why the module's parameters do not make those of the native model, or None; this takes a while."""
    try:
        config = _config(module, found)
        with torch.device("meta"):
            adopt.check_places(flux.Model(config), type(module).__name__, found, _keys(config))
    except ValueError as error:
        return str(error)
    return None


def why_not_call(arguments: Mapping[str, Any]) -> str | None:
    """Return why the native model cannot compute a call with these arguments of diffusers' forward, or None."""
    for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
        if arguments.get(name) is not None:
            return f"the call has {name}"
    others = sorted(set(arguments.get("joint_attention_kwargs") or ()) - {"scale"})
    return f"the call has joint_attention_kwargs {', '.join(others)}" if others else None


class Native:
    """A `seqpar.adapter.body.Body` for diffusers' FLUX.1."""

    def __init__(self, module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts | None) -> None:
        self._module, self._mesh, self._plan, self._cuts = module, mesh, plan, cuts
        self._forward = module.forward  # taken now, because the caller may put its own in this place
        self._ranks, self._watch = Ranks(mesh, plan), changes.Changes(module)
        self._seen: Hashable = None
        self._blocks: list[Any] = []
        self._why: str | None = None
        self._model: flux.Model | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._merged: dict[str, Tensor] = {}
        self._scale = 1.0
        self._addresses: tuple[int, ...] = ()
        self._other: generic.Generic | None = None

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """See `seqpar.adapter.body.Body`."""
        model = self._taken(arguments)
        if isinstance(model, generic.Generic):
            return model(arguments)
        return self._gathered(model.forward_tokens(*self._inputs(model, _checked(model, arguments))))

    def _taken(self, arguments: Mapping[str, Any]) -> flux.Model | generic.Generic:
        """Return what computes a call, with the weights as they are now; prints why it is not the native model."""
        scale = (arguments.get("joint_attention_kwargs") or {}).get("scale")
        self._refresh(1.0 if scale is None else scale)
        why = self._why or why_not_call(arguments)
        if why is None and self._model is not None:
            why = flux.why_not_autocast(self._mesh.device, self._model.dtype)
        if why is not None:
            return self._generic(why)
        assert self._model is not None
        return self._model

    def inside(self, arguments: Mapping[str, Any]) -> Inside:
        """See `seqpar.adapter.body.Body`."""
        model = self._taken(arguments)
        if isinstance(model, generic.Generic):
            return model.inside(arguments)
        alone, local = copy(self), Choice("reference", "one rank, to compare with")
        alone._mesh = Mesh.single(self._mesh.device)
        alone._ranks = Ranks(alone._mesh, replace(self._plan, local=local, transport=replace(local, name="collective")))

        def by_one(inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
            return alone._gathered(model.forward_tokens(*alone._inputs(model, _checked(model, inputs))))

        return Inside(model, self._ranks, by_one)

    def why_eager(self) -> str | None:
        """See `seqpar.adapter.body.Body`."""
        return None if self._other is None else self._other.why_eager()

    def state(self) -> Hashable:
        """See `seqpar.adapter.body.Body`; this also brings merged weights up to date, at the scale of the last call."""
        self._refresh(self._scale)
        other = None if self._other is None else self._other.state()
        scale = self._scale if self._merged else None
        return self._why, self._ranks.keeper.state, self._addresses, scale, other

    def told(self) -> Mapping[str, str]:
        """See `seqpar.adapter.body.Body`."""
        how = "by the native model" if self._why is None else f"by its own modules, because {self._why}"
        return {"computation": how, **self._watch.texts()}

    def version(self) -> Hashable:
        """See `seqpar.adapter.body.Body`."""
        return self._why, self._module.training, self._watch.count(), self._watch.values()

    def foreign(self) -> Foreign:
        """See `seqpar.adapter.body.Body`."""
        return self._watch.foreign()

    @property
    def lacks_memory(self) -> bool:
        """See `seqpar.adapter.body.Body`."""
        return self._other is not None and self._other.lacks_memory

    def end_copies(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        if self._other is not None:
            self._other.end_copies()

    def check_delivered(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        self._ranks.keeper.check()
        if self._other is not None:
            self._other.check_delivered()

    def release(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        self._forget()
        self._seen = None
        self._ranks.keeper.release()
        if self._other is not None:
            self._other.release()

    def _inputs(self, model: flux.Model, inputs: Mapping[str, Tensor]) -> Inputs:
        """Return the arguments of the model for this rank's tokens of a call."""
        forward = self._ranks.begin()
        encoded, image = model.encode(**{name: inputs[name] for name in model.PROMPT}), inputs["hidden_states"]
        rows = flux.rotary(torch.cat((inputs["txt_ids"], inputs["img_ids"])), model.config)

        def positions(split: Split) -> Mapping[str, Tensor]:
            parts = zip(model.STREAMS, rows.split([split.lengths[name] for name in model.STREAMS]), strict=True)
            return {name: split.mine(name, x, dim=0) for name, x in parts}

        share = Share.of(model, self._ranks.keeper, encoded, {"image": image.shape[1]}, positions, len(image))
        pooled = encoded.pooled["pooled_projections"]
        condition = model.modulate_call(
            inputs["timestep"], inputs.get("guidance"), pooled, spread=partial(self._ranks.spread, "modulation")
        )
        forward.lengths.update(share.split.lengths)
        return share.inputs({"image": share.split.mine("image", image)}, condition)

    def _gathered(self, out: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the predictions of all image tokens, (B, L, C)."""
        return (self._ranks.gather(out["image"], GatherTokens("image"), "output"),)

    # Weights ---------------------------------------------------------------------------------------------------

    def _refresh(self, scale: float) -> None:
        """Take over the module's weights and adapters as they are now, if anything changed since the last call."""
        if (self._signs(), scale) == (self._seen, self._scale):
            return
        self._seen, self._scale = None, scale
        seats.refuse_backends(self._module)
        with torch.inference_mode(False):  # weights outlive the caller's mode
            places = adopt.places(self._module)
            shapes = {key: place.parameter.shape for key, place in places.items()}
            self._why = _why_not_now(self._module, places)
            if self._why is None and shapes != self._shapes:
                self._why = _why_not_built(self._module, places)
            if self._why is None:
                self._adopt(places, scale)
                self._shapes = shapes
            else:
                self._forget()
        self._blocks = [*_blocks(self._module)]
        if any(block._compiled_call_impl is not None for block in self._blocks) and self._why is None:
            self._ranks.say("compiled blocks are not used, because the native model has kernels of its own")
        self._seen = self._signs()  # again, because taking the weights over has moved some

    def _signs(self) -> Hashable:
        """Return what tells that the module changed, in well under a millisecond."""
        module: Any = self._module
        compiled = tuple(block._compiled_call_impl is not None for block in self._blocks)
        return self._watch.count(), module._cache_config is not None, compiled

    def _adopt(self, found: Mapping[str, adopt.Holder], scale: float) -> None:
        config = _config(self._module, found)
        if self._model is None or self._model.config != config:
            with torch.device("meta"):
                self._model = flux.Model(config)
        keys, model = _keys(config), self._model
        where = next(iter(found.values())).parameter.device
        if where != self._mesh.device:
            raise ValueError(f"got a transformer on {where}, expected {self._mesh.device}; move the pipeline there")
        adopt.adopt(model, found, keys)
        self._merged = adopt.merge(model, self._module, keys, scale, self._merged)
        self._addresses = tuple(parameter.data_ptr() for parameter in model.parameters())

    def _forget(self) -> None:
        """Let go of the weights, so that only the module keeps them in memory."""
        self._model, self._merged, self._addresses, self._shapes = None, {}, (), {}

    def _generic(self, why: str) -> generic.Generic:
        """Return the generic body, which computes what the native model cannot, after the reason was printed."""
        self._ranks.say(f"the transformer's own modules compute, because {why}")
        if self._other is None:
            self._other = generic.build(self._module, self._mesh, self._plan, self._cuts, self._forward, fused=True)
        return self._other


def _checked(model: flux.Model, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call; ids without a batch dim, timestep and guidance with one number a row."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if missing := [name for name in (*NEEDED, *(["guidance"] if model.EMBEDS_GUIDANCE else ())) if name not in tensors]:
        raise ValueError(f"got no {', '.join(missing)}, expected a tensor: the transformer's forward needs it")
    if not model.EMBEDS_GUIDANCE and "guidance" in tensors:
        raise ValueError("got guidance, expected None: this transformer does not embed it")
    rows, dtype = len(tensors["hidden_states"]), model.x_embedder.weight.dtype
    for name in ("timestep", "guidance"):
        if name in tensors:
            tensors[name] = tensors[name].reshape(-1).expand(rows)
    for name in ("img_ids", "txt_ids"):
        tensors[name] = tensors[name][0] if tensors[name].dim() == 3 else tensors[name]
    tensors["hidden_states"] = tensors["hidden_states"].to(dtype)
    return tensors


def _config(module: Any, found: Mapping[str, adopt.Holder]) -> flux.Config:
    shapes = {key: tuple(place.parameter.shape) for key, place in found.items()}
    known = flux.recognise(shapes, {**module.config, "_class_name": type(module).__name__})
    assert known is not None
    return known[0]


def _keys(config: flux.Config) -> KeyMap:
    make: Callable[[flux.Config], KeyMap] = flux.KEY_MAPS["diffusers"]
    return make(config)


def _blocks(module: Any) -> Iterator[Any]:
    return itertools.chain(module.transformer_blocks, module.single_transformer_blocks)


# Reasons for the generic body ----------------------------------------------------------------------------------


def _of_layers(found: Mapping[str, adopt.Holder]) -> Iterator[str]:
    """Yield reasons in the module's own layers: quantised or replaced ones, dtypes, weights that are elsewhere."""
    first = next(iter(found.values())).parameter
    for key, place in found.items():
        weight = place.parameter
        if type(place.owner) not in (nn.Linear, nn.RMSNorm):
            yield f"{key} belongs to a {type(place.owner).__name__}, as in a quantised or changed model"
        if type(weight) is not nn.Parameter:
            yield f"{key} is a {type(weight).__name__}, as in a quantised model"
        if weight.device.type == "meta":
            yield f"{key} is not in memory between the layers' own calls, as with sequential offload"
        # without numbers of devices, because ranks compare their reasons
        here, there = weight.device.type, first.device.type
        if (weight.dtype, here) != (first.dtype, there):
            yield f"{key} is {weight.dtype} on {here}, and other weights {first.dtype} on {there}"
        if weight.device != first.device:
            yield f"{key} is on another device than other weights"
        if not weight.is_floating_point() or weight.itemsize < 2:
            yield f"{key} is {weight.dtype}"


def _of_adapters(module: nn.Module) -> Iterator[str]:
    """Yield reasons in adapters that cannot be merged."""
    for layer in filter(adapters.is_adapter, module.modules()):
        if adapters.active(layer) and (reason := adapters.why_not_merge(layer)) is not None:
            yield reason


def _of_hooks(module: Any) -> Iterator[str]:
    """Yield reasons in what the module does besides its own arithmetic, which the native model would leave out."""
    if module._cache_config is not None:
        yield f"a cache between steps ({type(module._cache_config).__name__}) is enabled"
    for block in _blocks(module):
        if getattr(block.attn, "fused_projections", False):
            yield "its projections are fused (fuse_qkv_projections), which the native model does by itself"
    yield from map(str, look(module).hooks)


def _of_settings(module: Any) -> Iterator[str]:
    """Yield reasons in modules of another class, or with other settings, than the transformer's config gives them."""
    yield from (reason for _, reason in plain.differences(module))
