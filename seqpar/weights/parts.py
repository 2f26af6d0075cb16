"""Schemas of the parts of a pipeline folder around the model: index, scheduler, decoder, text encoders.

The configs of models have theirs in the models' own files. What diffusers or transformers read themselves is checked
here before they do; they get the files as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from seqpar.weights.jsons import read_json
from seqpar.weights.schemas import (
    Channels,
    Heads,
    Layers,
    Number,
    Part,
    Schema,
    Tokens,
    Width,
    ZeroOrOne,
    checked,
    described,
    shown,
)

INDEX, SCHEDULER = "model_index.json", "scheduler_config.json"
LABEL = r"^\d{1,9}$"
MOST = (1 << 31) - 1  # of any whole number in a config that has no schema

Steps = Annotated[int, Meta(ge=1, le=100_000)]
Count = Annotated[int, Meta(ge=0, le=100_000)]
Order = Annotated[int, Meta(ge=1, le=100)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Sigma = Annotated[float, Meta(ge=0, le=1e6)]
Colours = Annotated[int, Meta(ge=3, le=3)]
Below = Annotated[float, Meta(le=1e6)]  # minus infinity stands for no limit


class Labels(Schema, frozen=True):
    """What seqpar itself takes from a model_index.json; the other fields name the pipeline's parts or are settings."""

    id2label: Annotated[dict[Annotated[str, Meta(pattern=LABEL)], str], Meta(max_length=1 << 20)] | None = None


class Scheduler(Schema, frozen=True):
    """The fields of diffusers' schedulers, all of them together: a field means the same in each class that has it."""

    num_train_timesteps: Steps | None = None
    original_inference_steps: Steps | None = None
    beta_start: Part | None = None
    beta_end: Part | None = None
    beta_schedule: str | None = None
    trained_betas: Annotated[list[Part], Meta(min_length=1, max_length=100_000)] | None = None
    prediction_type: str | None = None
    timestep_spacing: str | None = None
    timestep_type: str | None = None
    variance_type: str | None = None
    algorithm_type: str | None = None
    solver_type: str | None = None
    interpolation_type: str | None = None
    final_sigmas_type: str | None = None
    time_shift_type: str | None = None
    sigma_schedule: str | None = None
    steps_offset: Count | None = None
    solver_order: Order | None = None
    predictor_order: Order | None = None
    corrector_order: Order | None = None
    disable_corrector: Annotated[list[Count], Meta(max_length=100_000)] | None = None
    clip_sample: bool | None = None
    clip_sample_range: Positive | None = None
    thresholding: bool | None = None
    dynamic_thresholding_ratio: Part | None = None
    sample_max_value: Positive | None = None
    set_alpha_to_one: bool | None = None
    skip_prk_steps: bool | None = None
    rescale_betas_zero_snr: bool | None = None
    lower_order_final: bool | None = None
    euler_at_final: bool | None = None
    predict_x0: bool | None = None
    use_karras_sigmas: bool | None = None
    use_exponential_sigmas: bool | None = None
    use_beta_sigmas: bool | None = None
    use_flow_sigmas: bool | None = None
    use_lu_lambdas: bool | None = None
    use_dynamic_shifting: bool | None = None
    invert_sigmas: bool | None = None
    stochastic_sampling: bool | None = None
    lambda_min_clipped: Below | None = None
    shift: Positive | None = None
    flow_shift: Positive | None = None
    shift_terminal: Annotated[float, Meta(ge=0, lt=1)] | bool | None = None
    base_shift: Number | None = None
    max_shift: Number | None = None
    base_image_seq_len: Count | None = None
    max_image_seq_len: Count | None = None
    sigma_min: Sigma | None = None
    sigma_max: Sigma | bool | None = None
    sigma_data: Positive | None = None
    rho: Positive | None = None
    snr: Positive | None = None
    s_noise: Sigma | None = None
    s_churn: Sigma | None = None
    timestep_scaling: Positive | None = None


class Autoencoder(Schema, frozen=True):
    """The fields of diffusers' AutoencoderKL."""

    in_channels: Channels | None = None
    out_channels: Colours | None = None
    latent_channels: Channels | None = None
    block_out_channels: Annotated[list[Channels], Meta(min_length=1, max_length=8)] | None = None
    down_block_types: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    up_block_types: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    layers_per_block: Annotated[int, Meta(ge=1, le=64)] | None = None
    norm_num_groups: Channels | None = None
    act_fn: str | None = None
    sample_size: Width | Annotated[list[Width], Meta(min_length=1, max_length=2)] | None = None
    scaling_factor: Positive | None = None
    shift_factor: Number | None = None
    latents_mean: list[Number] | None = None
    latents_std: list[Number] | None = None
    force_upcast: bool | ZeroOrOne | None = None  # 1.0 in some published files
    use_quant_conv: bool | None = None
    use_post_quant_conv: bool | None = None
    mid_block_add_attention: bool | None = None


class TextEncoder(Schema, frozen=True):
    """The sizes in configs of transformers' text and image encoders."""

    hidden_size: Width | None = None
    d_model: Width | None = None
    d_kv: Width | None = None
    d_ff: Width | None = None
    intermediate_size: Width | None = None
    projection_dim: Width | None = None
    num_layers: Layers | None = None
    num_hidden_layers: Layers | None = None
    num_decoder_layers: Layers | None = None
    num_heads: Heads | None = None
    num_attention_heads: Heads | None = None
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    text_config: dict[str, Any] | None = None
    use_attention_mask: bool | None = None
    n_positions: Tokens | None = None


def read_pipeline(folder: Path) -> dict[str, Any]:
    """Return the model_index.json of a pipeline's folder.

    Raises ValueError if it names no class of a pipeline, if a part is no [library, class] or [null, null], or if
    id2label is no object of class numbers and names.
    """
    path = folder / INDEX
    found = read_json(path)
    if not isinstance(found.get("_class_name"), str):
        name = shown(found.get("_class_name"))
        raise ValueError(f"got {path} with _class_name={name}, expected the name of a pipeline's class")
    checked(str(path), found, Labels)
    for key, value in found.items():
        if not key.startswith("_") and isinstance(value, list) and not _is_part(value):
            raise ValueError(f"got {path} with {key[:60]}={shown(value)}, expected [library, class] or [null, null]")
    return found


def part_of(index: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """Return (library, class) of a part that a model_index.json names, or None if the pipeline has no such part.

    Raises ValueError if the field is no part.
    """
    value = index.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not _is_part(value):
        raise ValueError(f"got {INDEX} with {name}={shown(value)}, expected [library, class] or [null, null]")
    return None if value[0] is None else (value[0], value[1])


def _is_part(value: list[Any]) -> bool:
    names = [each for each in value if isinstance(each, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", each)]
    return len(value) == 2 and (len(names) == 2 or value == [None, None])


def read_scheduler(folder: Path) -> dict[str, Any]:
    """Return the scheduler's config in a folder; `ValueError` if a field has another type or range than it can have."""
    path = folder / SCHEDULER
    found = read_json(path)
    check_scheduler(found, str(path))
    return found


def check_scheduler(config: Mapping[str, Any], where: str = "a scheduler config") -> None:
    """Raise ValueError if a field of a scheduler's config has another type or range than diffusers' classes take."""
    array = getattr(config.get("trained_betas"), "tolist", None)  # in memory; in a file it is a list
    plain = config if array is None else {**config, "trained_betas": array()}
    found = checked(where, plain, Scheduler)
    if not isinstance(config.get("_class_name", ""), str):
        raise ValueError(f"got {where} with _class_name={shown(config['_class_name'])}, expected a class")
    count, betas = found.num_train_timesteps or 1000, found.trained_betas
    if betas is not None and len(betas) < count:
        raise ValueError(f"got {where} with {len(betas)} trained_betas, expected num_train_timesteps, which is {count}")
    few = 256 if found.base_image_seq_len is None else found.base_image_seq_len
    many = found.max_image_seq_len or 4096
    if few >= many:
        raise ValueError(f"got {where} with base_image_seq_len={few}, expected less than max_image_seq_len={many}")


def check_autoencoder(config: Mapping[str, Any], where: object) -> None:
    """Raise ValueError if a field of an AutoencoderKL's config has a type or range that no decoder has.

    where: its file, for the message.
    """
    found = checked(str(where), config, Autoencoder)
    if "scaling_factor" in config and found.scaling_factor is None:  # diffusers would take the null as it is
        raise ValueError(f"got {where} with scaling_factor=None, expected {described(Positive)}")
    widths = found.block_out_channels
    for name in ("down_block_types", "up_block_types"):
        kinds = getattr(found, name)
        if widths is not None and kinds is not None and len(kinds) != len(widths):
            raise ValueError(f"got {where} with {len(kinds)} {name}, expected {len(widths)}, as block_out_channels has")


def read_encoder(folder: Path) -> dict[str, Any]:
    """Return the config.json of an encoder of transformers; of CLIP's own folder that of the half that reads text.

    Raises ValueError if a size has another type or is out of range.
    """
    path = folder / "config.json"
    found = read_json(path)
    text = checked(str(path), found, TextEncoder).text_config
    if text is None:
        return found
    checked(f"{path} text_config", text, TextEncoder)
    return text


def check_numbers(config: Mapping[str, Any], where: object) -> None:
    """Raise ValueError if a config without a schema has numbers that no model has: what counts layers, or any other."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_numbers(value, where)
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, bool) or not isinstance(number, int):
                continue
            most = 4096 if re.search(r"layer|block|depth", key) and "size" not in key else MOST
            if abs(number) > most:
                raise ValueError(f"got {where} with {key[:60]}={shown(number)}, expected at most {most}")
