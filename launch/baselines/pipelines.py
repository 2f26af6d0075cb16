"""diffusers' FLUX.1-dev, Qwen-Image and Wan 2.1 pipelines with random weights, made from configs alone.

The tokenizers are generated: each letter is a token. Nothing is read or downloaded, so speed can be measured on a
machine without checkpoints; the images mean nothing. `compare` uses this file with other versions of seqpar, so nothing
of seqpar is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import printable
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from launch.baselines.released import RELEASED, randomise

Config = Mapping[str, Any]
THEIRS: Any = diffusers  # whose pipelines are imported where they are used, which takes seconds
SPECIAL = ("<pad>", "<unk>", "<eos>")
CLIP: Config = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"projection_dim": 768, "max_position_embeddings": 77, "vocab_size": 49408},
    **{"eos_token_id": SPECIAL.index("<eos>"), "pad_token_id": 0, "bos_token_id": 1},
}
T5: Config = {
    **{"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
    **{"feed_forward_proj": "gated-gelu", "vocab_size": 32128},
}
VAE: Config = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
FLUX_SIZES: Config = {"clip": CLIP, "t5": T5, "vae": VAE}
SMALL_FLUX: Config = {
    "clip": {
        **CLIP,
        **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "vocab_size": 110,
    },
    "t5": {"d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 110},
    "vae": {**VAE, "block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "norm_num_groups": 2},
}
"""The sizes of a pipeline around `Released.small()` of FLUX.1, for a CPU."""
TEXT: Config = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
VISION: Config = {"depth": 1, "hidden_size": 1280, "out_hidden_size": 3584}  # no image is read
QWEN_SIZES: Config = {"text": TEXT, "vision": VISION, "vae": {}}
SMALL_QWEN: Config = {
    "text": {
        **{"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        **{"num_key_value_heads": 1, "vocab_size": 110},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
    },
    "vision": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 12},
    "vae": {"base_dim": 4, "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
}

WAN_SIZES: Config = {"t5": {**T5, "vocab_size": 256384}, "vae": {}}
SMALL_WAN: Config = {
    "t5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 110},
    "vae": {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
}


def tokenizer(length: int) -> Any:
    """A tokenizer whose tokens are letters, for texts of up to `length` tokens with <eos> at the end."""
    words = {letter: index for index, letter in enumerate((*SPECIAL, *printable))}
    letters = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[1]))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", words["<eos>"])]
    )
    names = dict(zip(("pad_token", "unk_token", "eos_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=letters, model_max_length=length, **names)


def randomised(make: Callable[[], list[Any]], dtype: torch.dtype, device: torch.device) -> list[Any]:
    torch.manual_seed(0)
    with torch.device(device):  # positions and other buffers are made, too
        modules = [part.to(dtype).eval().requires_grad_(False) for part in make()]
    for seed, module in enumerate(modules, start=1):
        randomise(module, seed)
    return modules


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux(transformer: Any, dtype: torch.dtype, device: torch.device, sizes: Config = FLUX_SIZES) -> Any:
    def parts() -> list[Any]:
        clip = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes["clip"]))
        return [clip, transformers.T5EncoderModel(transformers.T5Config(**sizes["t5"])), AutoencoderKL(**sizes["vae"])]

    clip, t5, vae = randomised(parts, dtype, device)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    tokenizers = tokenizer(sizes["clip"]["max_position_embeddings"]), tokenizer(512)
    return quiet(THEIRS.FluxPipeline(scheduler, vae, clip, tokenizers[0], t5, tokenizers[1], transformer))


def qwen_image(transformer: Any, dtype: torch.dtype, device: torch.device, sizes: Config = QWEN_SIZES) -> Any:
    config = transformers.Qwen2_5_VLConfig(text_config={**sizes["text"]}, vision_config={**sizes["vision"]})

    def parts() -> list[Any]:
        return [transformers.Qwen2_5_VLForConditionalGeneration(config), AutoencoderKLQwenImage(**sizes["vae"])]

    text_encoder, vae = randomised(parts, dtype, device)
    shifts: Any = {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    scheduler = FlowMatchEulerDiscreteScheduler(**shifts)
    return quiet(THEIRS.QwenImagePipeline(scheduler, vae, text_encoder, tokenizer(1024), transformer))


def wan(transformer: Any, dtype: torch.dtype, device: torch.device, sizes: Config = WAN_SIZES) -> Any:
    def parts() -> list[Any]:
        t5 = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes["t5"]))
        return [t5, AutoencoderKLWan(**sizes["vae"])]

    text_encoder, vae = randomised(parts, dtype, device)
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return quiet(THEIRS.WanPipeline(tokenizer(512), text_encoder, vae, scheduler, transformer))


PIPELINES: dict[str, Any] = {
    "flux.1-dev": (flux, FLUX_SIZES, SMALL_FLUX),
    "qwen-image": (qwen_image, QWEN_SIZES, SMALL_QWEN),
    "wan2.1-14b": (wan, WAN_SIZES, SMALL_WAN),
}
"""Released transformer -> function of its pipeline, and the released and small sizes of the other parts."""


def saved(model: str, folder: Path, dtype: torch.dtype, small: bool = not torch.cuda.is_available()) -> None:
    """Write a pipeline of released or tiny sizes, unless the folder exists."""
    if (folder / "model_index.json").is_file():
        return
    device, known = torch.device("cuda" if torch.cuda.is_available() else "cpu"), RELEASED[model]
    pipeline, released, tiny = PIPELINES[model]
    transformer = (known.small() if small else known).build(dtype, device)
    pipeline(transformer, dtype, device, tiny if small else released).save_pretrained(folder)


def saved_loras(folder: Path, transformer: Path, names: Sequence[str], rank: int) -> None:
    """Write NAME.safetensors for each name: random LoRAs on every linear layer of a saved transformer's blocks."""
    config: Any = FluxTransformer2DModel.load_config(str(transformer))
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(config)
    linear = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and "blocks" in path}
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        drawn, state = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        for path, layer in linear.items():
            shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
            for side, shape in shapes.items():
                state[f"transformer.{path}.lora_{side}.weight"] = 0.02 * torch.randn(shape, generator=drawn)
        save_file(state, folder / f"{name}.safetensors")


def saved_controlnet(folder: Path, transformer: Path) -> None:
    """Write a random ControlNet with one block of each kind for a saved transformer of FLUX.1."""
    theirs: Any = FluxTransformer2DModel.from_pretrained(str(transformer))
    config = theirs.config
    net: Any = FluxControlNetModel.from_transformer(
        theirs, 1, 1, config.attention_head_dim, config.num_attention_heads, load_weights_from_transformer=False
    )
    randomise(net, 6)
    net.save_pretrained(folder)
