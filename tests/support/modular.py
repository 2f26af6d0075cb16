"""Tiny modular pipelines of diffusers with random weights, with every part that a downloaded one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from seqpar.families._modular import is_modular
from tests.support import pipelines
from tests.support.diffusers_tiny import FLUX3, HEADS, Z_IMAGE, sizes
from tests.support.pipelines import COUNT, ENCODER, ENCODERS, THEIRS, WIDTH, random_weights

SPECIAL = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")}
SPECIAL |= {f"{name}_token": f"<|{name}_pad|>" for name in ("image", "video")}
RATE = 8000  # of a sound


def words() -> Any:
    """Return a tokenizer with the tokens that stand for images."""
    return pipelines.tokenizer(512, extra_special_tokens=SPECIAL)


def qwen3_vl(seed: int, layers: int) -> Any:
    ids = {f"{name}_token_id": COUNT + i for i, name in enumerate(("vision_start", "vision_end", "image", "video"))}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 1e4}
    text = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": layers, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    vision |= {"patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = ENCODERS.Qwen3VLConfig(text_config={**text, "vocab_size": COUNT + 4}, vision_config=vision, **ids)
    return random_weights(ENCODERS.Qwen3VLForConditionalGeneration(config), seed)


def processor(tokens: Any) -> Any:
    """Return a processor that reads images as that of Qwen3-VL, which needs torchvision."""
    pixels = ENCODERS.Qwen2VLImageProcessorPil(patch_size=14, min_pixels=56 * 56, max_pixels=56 * 56)
    return ENCODERS.PaddleOCRVLProcessor(image_processor=pixels, tokenizer=tokens, chat_template=tokens.chat_template)


def anima() -> Any:
    transformer = THEIRS.CosmosTransformer3DModel(
        **{**sizes(12, 16, out_channels=16), "text_embed_dim": WIDTH, "adaln_lora_dim": 16, "patch_size": (1, 2, 2)},
        **{"concat_padding_mask": False, "extra_pos_embed_type": None},  # without torchvision
    )
    conditioner = THEIRS.AnimaTextConditioner(
        **{"source_dim": WIDTH, "target_dim": WIDTH, "model_dim": WIDTH, "num_layers": 1, "num_attention_heads": 2},
        **{"target_vocab_size": COUNT + 4, "min_sequence_length": 16},
    )
    return of_blocks(
        "AnimaModularPipeline",
        text_encoder=qwen3(2, 2),
        tokenizer=words(),
        t5_tokenizer=words(),
        text_conditioner=random_weights(conditioner, 3),
        vae=pipelines.qwen_image_vae(),
        transformer=random_weights(transformer, 4),
        scheduler=pipelines.flow(),
    )


def minimax_h3() -> Any:
    """Return MiniMax-H3: 124 frames of 32 x 32 pixels are 592 tokens, their sound 414."""
    stages = {"block_out_channels": (8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    stages |= {"spatial_downsample_factors": (2, 2, 1), "temporal_downsample_factors": (2, 2, 1)}
    stages |= {"decoder_num_layers": 1, "decoder_num_attention_heads": 1, "decoder_attention_head_dim": 16}
    vae = THEIRS.AutoencoderKLMiniMaxH3(**stages, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4)
    waves = {"encoder_dim": 2, "encoder_rates": (5, 5, 8), "latent_dim": 12, "num_attention_heads": 2}
    waves |= {"decoder_dim": 16, "decoder_rates": (5, 5, 8), "decoder_kernel_sizes": (9, 9, 16)}
    waves |= {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1,),), "sampling_rate": RATE}
    sound = THEIRS.AutoencoderKLMiniMaxH3Audio(
        **waves, latent_channels=6, latents_mean=[0.0] * 6, latents_std=[1.0] * 6
    )
    hidden = {"hidden_size": 24, "num_refiner_layers": 1, "ffn_dim": 32, "freq_dim": 16, "time_embed_dim": 12}
    model = THEIRS.MiniMaxH3Transformer3DModel(
        **sizes(8, 4, **hidden, audio_in_channels=6, text_dim=WIDTH, time_embed_hidden_dim=24, rope_freq_dim=1)
    )
    schedulers = {"scheduler": THEIRS.MiniMaxH3Scheduler(), "audio_scheduler": THEIRS.MiniMaxH3Scheduler(shift=3.0)}
    return of_blocks(
        "MiniMaxH3ModularPipeline",
        text_encoder=qwen3_vl(2, 51),  # the output of its fiftieth layer is read
        tokenizer=words(),
        processor=processor(words()),
        vae=random_weights(vae, 1),
        audio_vae=random_weights(sound, 3),
        transformer=random_weights(model, 4),
        transformer_ref=random_weights(THEIRS.MiniMaxH3Transformer3DModel(**model.config), 5),
        **schedulers,
        reference_image_short_edge=32,  # a setting of the pipeline, which its index holds
    )


def qwen3(seed: int, layers: int, **sizes: int) -> Any:
    """Return a text encoder, which also stands for others that are called so."""
    heads = {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": layers, "max_window_layers": layers}
    config = ENCODERS.Qwen3Config(**{**ENCODER, **heads, "vocab_size": COUNT + 4, **sizes})
    return random_weights(ENCODERS.Qwen3Model(config), seed)


def with_template() -> Any:
    made = words()
    made.chat_template = "{{ messages[0]['content'] }}"
    return made


def like(kind: str, pipe: Any, **others: Any) -> Any:
    """Return the modular pipeline with the parts of an ordinary one, but for others."""
    specs = getattr(THEIRS, kind)().component_names
    parts = {name: part for name, part in pipe.components.items() if name in specs and part is not None}
    return of_blocks(kind, **{**parts, **others})


def flux() -> Any:
    return like("FluxModularPipeline", pipelines.flux())


def sd3() -> Any:
    return like("StableDiffusion3ModularPipeline", pipelines.sd3())


def flux2_klein() -> Any:
    """Return the distilled klein, which has no guider."""
    return like("Flux2KleinModularPipeline", pipelines.flux2_klein())


def flux2_klein_base() -> Any:
    return like("Flux2KleinBaseModularPipeline", pipelines.flux2_klein())


def qwen_image() -> Any:
    parts = {"text_encoder": qwen3(2, 2), "tokenizer": words()}
    return like("QwenImageModularPipeline", pipelines.qwen_image(), **parts)


def krea2() -> Any:
    ordinary = pipelines.krea2()  # with three layers of the text, of which modular blocks take twelve
    transformer = THEIRS.Krea2Transformer2DModel(**{**ordinary.transformer.config, "num_text_layers": 12})
    parts = {"text_encoder": qwen3_vl(2, 36).model, "tokenizer": words()}
    return like("Krea2ModularPipeline", ordinary, transformer=random_weights(transformer, 5), **parts)


def z_image() -> Any:
    transformer = THEIRS.ZImageTransformer2DModel(**{**Z_IMAGE, "cap_feat_dim": WIDTH})
    return of_blocks(
        "ZImageModularPipeline",
        text_encoder=qwen3(2, 2),
        tokenizer=with_template(),
        vae=pipelines.decoder(1),
        transformer=random_weights(transformer, 4),
        scheduler=pipelines.flow(),
    )


def wan() -> Any:
    return like("WanModularPipeline", pipelines.wan())


def wan22() -> Any:
    return like("Wan22ModularPipeline", pipelines.wan(2))


def wan_i2v() -> Any:
    return like("WanImage2VideoModularPipeline", pipelines.wan_i2v())


def ltx() -> Any:
    return like("LTXModularPipeline", pipelines.ltx())


def ltx2() -> Any:
    parts = {"text_encoder": qwen3(2, 1), "tokenizer": words()}  # the encoder's input and output are layers of the text
    return like("LTX2ModularPipeline", pipelines.ltx2(), **parts)


def ltx2_ordinary() -> Any:
    """Return the ordinary pipeline with the same text encoder."""
    parts = {name: part for name, part in pipelines.ltx2().components.items() if part is not None}
    return THEIRS.LTX2Pipeline(**parts, text_encoder=qwen3(2, 1), tokenizer=words())


def hunyuan_video15() -> Any:
    """Return HunyuanVideo 1.5, whose blocks drop the first 108 tokens of a text."""
    tokens = words()
    tokens.chat_template = "{{ 'the ' * 108 }}{{ messages[-1]['content'] }}"
    parts = {"text_encoder": qwen3(2, 3), "tokenizer": tokens}
    parts |= {"text_encoder_2": pipelines.t5(3, width=8), "tokenizer_2": words()}
    return like("HunyuanVideo15ModularPipeline", pipelines.hunyuan_video15(), **parts)


def flux2() -> Any:
    klein = pipelines.flux2_klein()
    transformer = THEIRS.Flux2Transformer2DModel(**{**klein.transformer.config, "guidance_embeds": True})
    parts = {"text_encoder": qwen3(2, 2), "tokenizer": with_template()}
    return like("Flux2ModularPipeline", klein, transformer=random_weights(transformer, 4), **parts)


def wan22_vace() -> Any:
    """Return Wan 2.2 VACE, of which both experts read the frames that control the video."""
    config = {**pipelines.WAN, "vace_layers": [0], "vace_in_channels": 96}
    experts = [random_weights(THEIRS.WanVACETransformer3DModel(**config), seed) for seed in (5, 6)]
    parts = dict(zip(("transformer", "transformer_2"), experts, strict=True))
    return like("Wan22VaceModularPipeline", pipelines.wan(2), **parts)


def qwen_image21() -> Any:
    transformer = THEIRS.QwenImage21Transformer2DModel(
        **sizes(16, 4, out_channels=4, context_in_dim=WIDTH, axes_dims_rope=(4, 6, 6))
    )
    blocks = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1] * 4, "num_res_blocks": 1}
    blocks |= {"temperal_downsample": [False] * 3, "scale_factor_spatial": 8, "scale_factor_temporal": 1}
    vae = THEIRS.AutoencoderKLQwenImage21(**blocks, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return of_blocks(
        "QwenImage21ModularPipeline",
        text_encoder=qwen3_vl(2, 2),
        processor=processor(with_template()),
        vae=random_weights(vae, 1),
        transformer=random_weights(transformer, 5),
        scheduler=pipelines.flow(),
    )


def ltx25() -> Any:
    """Return LTX-2.5, whose decoder denoises, too; a model reads from the text how long a video is."""
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    stages = {"decoder_head_dim": 8, "decoder_stage_channels": (16, 16), "decoder_stage_depths": (1, 1)}
    stages |= {"decoder_stage_kernels": ((3, 3, 3),), "decoder_stage5_kernel": (3, 3, 3), "decoder_t_emb_dim": 8}
    stages |= {"decoder_upsample_strides": ((2, 2, 2),), "decoder_upsample_channel_reductions": (1,)}
    stages |= {"latent_channels": 4, "spatial_compression_ratio": 8, "temporal_compression_ratio": 2}
    pipe, head = pipelines.ltx2(), {"pooler_hidden_dim": 16, "num_pooler_heads": 2, "mlp_hidden_dim": 8}
    head |= dict.fromkeys(("video_cross_attention_dim", "audio_cross_attention_dim"), HEADS * pipelines.HEAD_DIM)
    models: Any = {"diffusion_decoder": THEIRS.LTX2VideoDiffusionDecoderModel(**stages)}
    models["duration_head"] = LTX2DurationHead(**head)
    parts = {name: random_weights(model, seed) for seed, (name, model) in enumerate(models.items(), 7)}
    return like("LTX25ModularPipeline", pipe, text_encoder=qwen3(2, 1), tokenizer=words(), **parts)


def flux3() -> Any:
    klein, config = pipelines.flux2_klein(), {**FLUX3, "in_channels": 16, "cond_in_channels": 16}
    transformer = THEIRS.Flux3Transformer2DModel(**{**config, "joint_attention_dim": 8 * WIDTH})
    return of_blocks(
        "Flux3ModularPipeline",
        text_encoder=qwen3_vl(2, 33),
        tokenizer=processor(with_template()),
        prompt_upsampler=qwen3_vl(13, 2),  # any model that generates text
        prompt_upsampler_processor=processor(with_template()),
        vae=klein.vae,
        transformer=random_weights(transformer, 4),
    )


def of_blocks(kind: str, **parts: Any) -> Any:
    """Return a modular pipeline of these parts."""
    with torch.no_grad():
        pipe = getattr(THEIRS, kind)()
        pipe.update_components(**parts)
    return pipe


def saved(pipe: Any, folder: Path) -> Path:
    """Write a pipeline in fp32; return its folder."""
    options = {"overwrite_modular_index": True} if is_modular(pipe) else {}
    pipe.to(torch.float32).save_pretrained(str(folder), **options)
    return folder


def reference(image: Any) -> Any:
    """Return an image to which MiniMax-H3's videos refer."""
    from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference

    return MiniMaxH3ImageReference(image=image)
