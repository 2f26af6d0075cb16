"""Takes rank 0's inputs of a call of `DistributedDiT` and checks them, alike on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.loop.interface import SequenceModel
from seqpar.mesh.inputs import agree, broadcast, shapes
from seqpar.mesh.mesh import Mesh
from seqpar.types.arguments import check_dense, check_floats, is_not_finite

SCALARS = ("timestep", "guidance")  # inputs that may be one number for all images


class Inputs:
    """The inputs of a model's calls; it remembers which prompt was found right last."""

    def __init__(self, mesh: Mesh, model: SequenceModel) -> None:
        self._mesh, self._model = mesh, model
        self._right: list[tuple[weakref.ref[Tensor], object]] = []  # the prompt that was found right last

    def of_rank_0(self, inputs: Mapping[str, Tensor | float | None]) -> dict[str, Tensor]:
        """Return rank 0's inputs on every rank; inputs of None are left out.

        Raises the same ValueError on every rank for inputs that the model does not take. Every rank must call this.
        """
        tensors, refused = {}, {}
        for name, value in inputs.items():
            try:
                tensors |= {} if value is None else {name: torch.as_tensor(value)}
            except (TypeError, ValueError, RuntimeError) as error:  # other ranks may have no error, so all must be told
                refused[f"argument {name}"] = f"{type(value).__name__}, which is no tensor ({error})"
        unusable, latents = _unusable(tensors), tensors.get("hidden_states")
        wants_gradients = latents is not None and latents.requires_grad
        form = {**shapes(tensors), "requires_grad": wants_gradients, **refused, **unusable}
        wrong = self._why_no_prompt(tensors) if self._mesh.is_main else None
        wrong = self._mesh.share(wrong, str | None) if agree(self._mesh, form, vote=wrong is not None) else None
        if refused:
            name, got = next(iter(refused.items()))
            raise ValueError(f"got {name} of type {got}, expected a tensor or a number")
        if wants_gradients:
            raise ValueError(
                "got hidden_states that require gradients, expected none: a sharded model is for inference"
            )
        for reason in (*unusable.values(), wrong):
            if reason is not None:
                raise ValueError(reason)
        shared = broadcast(self._mesh, tensors)
        _check(self._model, shared)
        return shared

    def _why_no_prompt(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return why the values of a prompt have no meaning, or None; a tensor that was found right is not read again.

        A pipeline passes the same labels at every step, and reading them waits for the device.
        """
        prompt = {name: x for name, x in tensors.items() if name in self._model.PROMPT}
        if set(prompt) != set(self._model.PROMPT) or _unusable(prompt):
            return None  # another check refuses it
        seen = [x() for x, _ in self._right]
        same = len(seen) == len(prompt) and all(x is y for x, y in zip(seen, prompt.values(), strict=True))
        if same and [_version(x) for x in prompt.values()] == [version for _, version in self._right]:
            return None
        try:
            self._model.check_prompt(prompt)
        except ValueError as error:
            return str(error)
        self._right = [(weakref.ref(x), _version(x)) for x in prompt.values()]
        return None


def repeated(inputs: Mapping[str, Tensor], parts: int, device: torch.device) -> dict[str, Tensor]:
    """Move inputs to a device with one row an image, and repeat rows until there are `parts`."""
    rows, whole = len(inputs["hidden_states"]), {name: x.to(device) for name, x in inputs.items()}
    whole |= {name: whole[name].reshape(-1).expand(rows) for name in SCALARS if name in whole}
    if rows >= parts:
        return whole
    return {name: torch.cat([x] * -(-parts // rows))[:parts] for name, x in whole.items()}


def _check(model: SequenceModel, inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError for inputs of other names or shapes than the model's."""
    channels = model.config.in_channels
    if "hidden_states" not in inputs:
        raise ValueError(f"got no hidden_states, expected a tensor (B, {channels}, H, W)")
    x, labels = inputs["hidden_states"], inputs.keys() - {"hidden_states", "timestep"}
    if x.dim() not in (4, 5) or x.shape[1] != channels:
        raise ValueError(f"got hidden_states of shape {tuple(x.shape)}, expected (B, {channels}, H, W)")
    wanted = {*model.PROMPT}
    if "timestep" not in inputs or not wanted - set(model.MASKS) <= labels <= wanted:
        names = ", ".join(("timestep", *sorted(wanted)))
        raise ValueError(f"got arguments timestep={'timestep' in inputs}, {sorted(labels)}, expected {names}")
    for name, value in inputs.items():
        one = name in SCALARS and value.numel() == 1
        if name in SCALARS and value.dim() > 1:
            raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected () or ({len(x)},)")
        if len(x) == 0 or (value.shape[:1] != x.shape[:1] and not one):
            expected = f"{len(x) or 'some'} rows, one an image"
            raise ValueError(f"got {name} of shape {tuple(value.shape)}, expected {expected}")


def _version(x: Tensor) -> object:
    """Return what changes when a tensor is written to; a tensor of inference mode does not count writes."""
    return object() if x.is_inference() else x._version


def _unusable(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return why tensors of a call cannot be used, by name."""
    reasons = {}
    for name, x in tensors.items():
        try:
            (check_floats if name == "hidden_states" else check_dense)(name, x)
            if x.is_complex():
                reasons[name] = f"got {name} of {x.dtype}, expected real numbers"
            if name in SCALARS and (x.dtype == torch.bool or is_not_finite(x)):
                reasons[name] = f"got {name} {x.tolist()}, expected finite numbers"
        except ValueError as error:
            reasons[name] = str(error)
    return {f"use of {name}": why for name, why in reasons.items()}
