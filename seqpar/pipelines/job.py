"""`Job`: a checked request of the loop's own models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from seqpar.loop.blueprint import Blueprint, check_heads
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.files import Files
from seqpar.pipelines.order import NO_IMAGES, NO_LORA, Order
from seqpar.pipelines.pictures import to_pil
from seqpar.planner.plan import make, named_mesh, work_of
from seqpar.planner.predict import Load
from seqpar.planner.search import Wish
from seqpar.types.facts import Work
from seqpar.types.guidance import Guidance
from seqpar.types.pictures import check_loading, check_pictures


@dataclass(frozen=True)
class Job:
    """Checked work of a family with a loop of its own, before any weight is read.

    pipeline: the family's class; `pipeline.load(**loading, plan=plan)` loads the weights, and `latents(**settings)` of
    what it returns samples. captions: a text for each picture; sheet: whether the pictures are one labelled sheet.
    named: what the user named (classes or prompts), for the metadata. schedule: keyword arguments of the scheduler's
    set_timesteps. notes: (title, text) of further lines of the summary.
    """

    pipeline: Any
    blueprint: Blueprint
    loading: Mapping[str, Any]
    settings: Mapping[str, Any]
    load: Load
    guidance: Guidance
    scheduler: Any
    dtype: torch.dtype
    pixels: tuple[int, int]
    captions: Sequence[str]
    named: Mapping[str, Sequence[str]]
    sheet: bool = False
    notes: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def files(self) -> Any:
        """Return the checked files, with which the family checks further orders."""
        return self.loading["files"]

    @property
    def work(self) -> Work:
        """Return what the planner needs of the model."""
        return work_of(self.blueprint.config)

    @property
    def decodes(self) -> bool:
        """Return whether a decoder comes with the model."""
        return self.files.vae is not None

    @property
    def evaluations(self) -> int:
        """Return the number of calls of the model: one a step, about two a step for schedulers such as Heun's."""
        return self.load.steps

    @staticmethod
    def of(
        pipeline: Any, files: Files, order: Order, guidance: Guidance, scheduler: Any, asked: Sequence[Any], **more: Any
    ) -> Job:
        """Return the job of these files for one picture of each of `asked`, the classes or prompts.

        scheduler: with its timesteps set; without one the order's steps are the evaluations. more: further fields;
        `loading` and `settings` are added to those that every family has.
        """
        check_heads(files.blueprint.name, files.blueprint.config, order.heads)
        height, width = files.latent_size(order.size)
        evaluations = order.steps if scheduler is None else len(scheduler.timesteps)
        settings = {"steps": order.steps, "seed": order.seed, "size": order.size, "guidance": guidance}
        return Job(
            pipeline=pipeline,
            blueprint=files.blueprint,
            loading={"files": files, "dtype": order.dtype, **more.pop("loading", {})},
            settings={**settings, **more.pop("settings", {})},
            load=files.load_of(asked, guidance.on, evaluations, order.dtype, order.size),
            guidance=guidance,
            scheduler=scheduler,
            dtype=order.dtype,
            pixels=(height * files.factor, width * files.factor),
            **more,
        )


def planned(order: Order, model: Blueprint) -> Job:
    """Return what the planner needs of an order for a model that no family runs: its config, and its `work`.

    Guidance of over 1, or none that is named where the model's usual run has it, counts as two branches.
    """
    order.refuse(NO_LORA, lora=order.loras)
    order.refuse(NO_IMAGES, image=order.images, strength=order.strength)
    files = Files(model)
    scale = (4.0 if work_of(files.blueprint.config).guided else 1.0) if order.guidance is None else order.guidance
    asked = [each for each in order.classes or order.prompts or ("",) for _ in range(order.repeat)]
    return Job.of(None, files, order, Guidance(scale), None, asked, captions=list(map(str, asked)), named={})


def generated(
    order: Order,
    mesh: Mesh | str | None,
    kind: str,
    guidance: Callable[[], Guidance | None],
    job: Callable[[Order, Guidance | None, str], Job],
) -> list[Image.Image]:
    """Return a picture of each class or prompt on every rank, from rank 0's order; every rank must call this.

    order: unchecked, as a caller of the library gave it. kind: its field of what is asked for, "classes" or "prompts".
    guidance: returns the caller's, None for the model's own. job: returns the checked work for rank 0's order and its
    model.
    """
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    ranks.together(lambda: check_loading(order.model, order.dtype))
    own, wish = ranks.together(lambda: named_mesh(mesh, Wish()))
    asked: Any = getattr(order, kind)
    ranks.together(lambda: check_pictures(kind, asked, order.steps, guidance() or Guidance(), order.size, order.seed))
    given: Any = {kind: tuple(asked), "model": str(order.model)}
    shared, scale = ranks.share((replace(order, **given), guidance()), tuple[Order, Guidance | None])
    if not getattr(shared, kind):
        raise ValueError(f"got no {kind}, expected one a picture")
    work = ranks.together(lambda: job(shared, scale, shared.model))
    plan = make(work_of(work.blueprint.config), work.load, work.dtype, ranks, wish, own)
    with work.pipeline.load(**work.loading, mesh=own, plan=plan) as pipeline:
        return to_pil(pipeline.decode(pipeline.latents(**work.settings)))
