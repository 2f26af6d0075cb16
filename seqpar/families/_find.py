"""Finds what this package knows of a model by the name of its class. Each file of the folder is a family.

A new file needs no registration; what it may export is said in the package's docstring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

import seqpar.families
from seqpar.families import Pipelines, Preset, Published
from seqpar.families._block import Block
from seqpar.families._cuts import HELP, HOME, Cuts, StepBlocks, check, from_diffusers
from seqpar.families._modular import SCALE, parameters_of, takes_image
from seqpar.families._refused import REFUSED
from seqpar.types.facts import Work
from seqpar.types.plugins import plugin, plugins

Sides = tuple[int, int, int]
"""Frames, rows and columns of latents."""
FILES = {name: plugin(seqpar.families, name, "family") for name in plugins(seqpar.families)}


def _merged(name: str) -> dict[Any, Any]:
    merged: dict[Any, Any] = {}
    for file in FILES.values():
        table = getattr(file, name, {})
        if twice := merged.keys() & table.keys():
            raise ValueError(f"{file.__name__} and another family have {name} for {', '.join(sorted(map(str, twice)))}")
        merged |= table
    return merged


def _joined(name: str) -> frozenset[str]:
    return frozenset(entry for file in FILES.values() for entry in getattr(file, name, ()))


CUTS: dict[str, Cuts] = _merged("CUTS")
BLOCKS: dict[str, Block] = _merged("BLOCKS")
WORK: dict[str, Callable[..., Work]] = _merged("WORK")
PUBLISHED: dict[str, Published] = _merged("PUBLISHED")
TOKENS: dict[str, Callable[[Mapping[str, Any], Sides], tuple[int, ...]]] = _merged("TOKENS")
PROMPT_TOKENS: dict[str, int] = _merged("PROMPT_TOKENS")
OF_TEXT: dict[str, str] = _merged("OF_TEXT")
UNSPLIT: dict[type, tuple[str, str]] = _merged("UNSPLIT")
RANDOM_MODELS: dict[str, tuple[str, Any, Any]] = _merged("RANDOM_MODELS")
ROW_LISTS, WITHOUT_ROWS, UNGUIDED = map(_joined, ("ROW_LISTS", "WITHOUT_ROWS", "UNGUIDED"))
UNPAIRED = _joined("UNPAIRED")
STEPS: dict[str, StepBlocks] = _merged("STEPS")
FUSED = frozenset(name for name, file in FILES.items() if hasattr(file, "BLOCKS"))  # files with fused blocks
# of models without a file here
OTHERS = Pipelines(
    reads_layers=("JoyImageEditPipeline", "JoyImageEditPlusPipeline"), sigmas="DreamLite|MotifVideo|NucleusMoE"
)
PIPELINES = (OTHERS, *(file.PIPELINES for file in FILES.values() if hasattr(file, "PIPELINES")))
# in the names of pipelines that make nothing without a picture, though their calls have a default for it
NEEDS = re.compile("Img2Img|Edit|ImageToVideo|Image2Video|I2V|I2I|Refiner")


def cuts_of(module: nn.Module, asked: Cuts | Mapping[str, Any] | None = None) -> Cuts:
    """Return the cuts of a transformer: the caller's, its family's, or those of its `_cp_plan`.

    asked: a `Cuts`, or a plan in diffusers' form. A class of no family has the cuts of the class that it derives from,
    and is not split over ranks if its forward is a user's own. Raises ValueError, the same on every rank, if there are
    none, or if they do not fit the transformer.
    """
    plan: Any = getattr(module, "_cp_plan", None)
    default = next((CUTS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in CUTS), plan)
    cuts = default if asked is None else asked
    if not cuts and not isinstance(cuts, Cuts):
        name = type(module).__name__
        if name in REFUSED:
            raise ValueError(f"got {name}, whose tokens are not split: {REFUSED[name]}; use another transformer")
        raise ValueError(f"got {name}, which has no known cuts of its tokens; {HELP}")
    cuts = cuts if isinstance(cuts, Cuts) else from_diffusers(module, cuts)
    check(module, cuts)
    reason = _why_not(type(module)) if asked is None else None
    return cuts if reason is None else replace(cuts, why_not=lambda module: reason)


def steps_of(module: nn.Module) -> StepBlocks | None:
    """Return the blocks that a step cache of a transformer may leave out; None if they are not known."""
    return next((STEPS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in STEPS), None)


def _why_not(kind: type) -> str | None:
    # why the cuts of a class may not fit the forward of one that derives from it
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    cut = next((base for base in kind.__mro__ if base.__name__ in CUTS or vars(base).get("_cp_plan")), owner)
    if kind.__mro__.index(owner) >= kind.__mro__.index(cut) or owner.__module__.startswith(HOME):
        return None
    return (
        f"{owner.__name__} overrides forward, which may decide by one rank's tokens; cuts= says that it "
        f"computes each token by itself"
    )


def tokens_of(transformer: Any, latents: Sides, patch: int | None = None) -> tuple[int, ...]:
    """Return how many tokens a transformer makes of latents, and those of further streams besides text.

    patch: rows, and columns, of latents that are one token, where the pipeline makes tokens; None: as the config says.
    """
    config, kinds = transformer.config, (kind.__name__ for kind in type(transformer).__mro__)
    if (special := next((TOKENS[kind] for kind in kinds if kind in TOKENS), None)) is not None:
        return special(config, latents)
    deep, *sides = patches_of(config)
    rows, columns = sides if patch is None else (patch, patch)
    return (-(-latents[0] // deep) * (latents[1] // rows) * (latents[2] // columns),)


def patches_of(config: Mapping[str, Any]) -> Sides:
    """Return the frames, rows and columns of latents that a transformer with this config makes one token."""
    known = config.get("patch_size") or config.get("latent_patch_size") or config.get("all_patch_size") or 1
    several = known if isinstance(known, (tuple, list)) else (known,)
    frames = several[0] if len(several) == 3 else config.get("patch_size_t") or 1
    return frames, several[-1], several[-1]


def stored_in_8_bits(module: nn.Module) -> list[str]:
    """Return the names of the weights of a transformer without adapters that precision="fp8" keeps in 8 bits alone.

    These are the linear layers of the blocks that compute in 8 bits, whatever dtype a layer itself computes in.
    """
    names = list[str]()
    for path, part in module.named_modules():
        block = BLOCKS.get(type(part).__name__) if type(part).__module__.startswith(HOME) else None
        if block is not None and block.eight:
            names += [f"{path}.{name}.weight" for name, x in part.named_modules() if type(x) is nn.Linear]
    return names


def joined_weights(module: nn.Module) -> list[list[str]]:
    """Return the names of weights and biases that fused blocks of a transformer read as one matrix each, in order."""
    names = list[list[str]]()
    for path, part in module.named_modules():
        block = BLOCKS.get(type(part).__name__) if type(part).__module__.startswith(HOME) else None
        for layers in () if block is None else block.layers.values():
            names += [[f"{path}.{layer}.{kind}" for layer in layers] for kind in ("weight", "bias")]
    return names


def pairs_calls(module: nn.Module) -> bool:
    """Return whether the two calls of a guided step may run together: known of families, and of what derives from one.

    A transformer of no family may be called once per step.
    """
    name = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in CUTS), None)
    return name is not None and name not in UNPAIRED


def is_guided(module: nn.Module) -> bool:
    """Return whether pipelines of this class compute an unconditional branch: not where guidance is an input."""
    config: Any = getattr(module, "config", {})
    return not config.get("guidance_embeds", False) and type(module).__name__ not in UNGUIDED


def takes_several_images(pipeline: str) -> bool:
    """Return whether a pipeline class takes several images for one result."""
    return any(pipeline.startswith(facts.several_images) for facts in PIPELINES)


def needs_picture(caller: Any) -> bool:
    """Return whether a pipeline generates nothing without an input image. caller: see `_modular`."""
    name = (caller if isinstance(caller, type) else type(caller)).__name__
    image = parameters_of(caller).get("image")
    return takes_image(caller) and bool(NEEDS.search(name) or (image is not None and image.default is image.empty))


def makes_one_result(pipeline: str) -> bool:
    """Return whether a pipeline class takes one prompt per call with an image."""
    return any(pipeline.startswith(facts.one_result) for facts in PIPELINES)


def takes_one_prompt(pipeline: str) -> bool:
    """Return whether a pipeline class takes one prompt per call, as a string."""
    return any(pipeline.startswith(facts.one_prompt) for facts in PIPELINES)


def is_distilled(pipeline: str, index: Mapping[str, Any]) -> bool:
    """Return whether a pipeline ignores a guidance scale. index: its model_index.json."""
    keys = (key for facts in PIPELINES for start, key in facts.distilled.items() if pipeline.startswith(start))
    return any(index.get(key) for key in keys)


def image_class(pipeline: str) -> tuple[str, str] | None:
    """Return `Pipelines.image_class` of a pipeline class, or None."""
    return next((facts.image_class[pipeline] for facts in PIPELINES if pipeline in facts.image_class), None)


def gives_sigmas(pipeline: str) -> bool:
    """Return whether a pipeline class passes sigmas to its scheduler."""
    return any(re.match(facts.sigmas, pipeline) for facts in PIPELINES if facts.sigmas is not None)


def reads_layers(pipeline: str) -> bool:
    """Return whether a pipeline class reads layers of its encoders."""
    return any(pipeline in facts.reads_layers for facts in PIPELINES)


def experts() -> dict[str, tuple[str, re.Pattern[str]]]:
    """Return `Pipelines.experts` of all families."""
    return {name: expert for facts in PIPELINES for name, expert in facts.experts.items()}


def presets(pipeline: str, index: Mapping[str, Any]) -> dict[str, Preset]:
    """Return the presets of a pipeline class by their names. index: its model_index.json."""
    known = [x for facts in PIPELINES for x in facts.presets if x.fits(pipeline, index)]
    if "Modular" in pipeline:
        known = [replace(x, arguments=_of_guiders(x.arguments)) for x in known]
    return {x.name: x for x in known}


def _of_guiders(arguments: Mapping[str, Any]) -> dict[str, Any]:
    # for a modular pipeline, whose guiders have one scale, which is 1 without a second branch
    others = dict(arguments)
    scale = others.pop("true_cfg_scale", others.pop(SCALE, None))
    return others if scale is None else {**others, SCALE: max(scale, 1.0)}


def why_no_preset(pipeline: str, known: Mapping[str, Preset]) -> str:
    """Return what follows where a name is none of a pipeline's presets."""
    return f"the presets of {pipeline} are {', '.join(known)}" if known else f"{pipeline} has no presets"


def leaves_out(key: str) -> bool:
    """Return whether diffusers' conversion of a LoRA file drops this key with no warning."""
    return any(facts.left_out.fullmatch(key) for facts in PIPELINES if facts.left_out is not None)


def config_of_file(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Return the config.json of a transformer's file in its authors' keys; None if no family knows it by its shapes.

    Raises ValueError if the shapes do not determine it.
    """
    configs = (file.config_of_file(shapes) for file in FILES.values() if hasattr(file, "config_of_file"))
    return next((config for config in configs if config is not None), None)
