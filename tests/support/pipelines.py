"""Tiny diffusers pipelines with random weights: text encoders, tokenizers and decoders are made here, nothing is read.

They are diffusers' own pipeline classes, with every part that a downloaded one has; only sizes and weights differ.
Pipelines without a text encoder take prompts as embeddings.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from tests.support.diffusers_tiny import HEADS, MODELS, sizes
from tests.support.meshes import random

WORDS = ("blurry", "a", "the", "red", "blue", "old", "cat", "house", "sea", "on", "of")
THEIRS: Any = diffusers  # pyright does not see what these packages import lazily
ENCODERS: Any = transformers
SPECIAL = ("<pad>", "<unk>", "<eos>")
COUNT = len(WORDS) + len(SPECIAL)
WIDTH = 32  # of text encoders
HEAD_DIM = 8
ENCODER = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4}
STAGES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


def tokenizer(length: int, **options: Any) -> Any:
    """Return a tokenizer of whole words that ends texts with <eos>, for texts of up to `length` tokens."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL[:2], *WORDS, SPECIAL[2]))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    end = vocabulary["<eos>"]
    made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", end)])
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return ENCODERS.PreTrainedTokenizerFast(tokenizer_object=made, **names, model_max_length=length, **options)


def random_weights(module: nn.Module, seed: int) -> Any:
    """Return a module in fp64 with random weights that are the same on every rank; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        fan = weight[0].numel() if weight.dim() > 1 else 100
        mean = 1.0 if weight.dim() == 1 and name.endswith("weight") else 0.0
        nn.init.normal_(weight, mean=mean, std=fan**-0.5, generator=generator)
    return module.double().eval().requires_grad_(False)


def clip(seed: int, projected: bool = False, tokens: int = 16) -> Any:
    """Return a CLIP text encoder; its pooled output is the state of <eos>."""
    ends = {"eos_token_id": COUNT - 1, "bos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": tokens}
    config = ENCODERS.CLIPTextConfig(vocab_size=COUNT, num_hidden_layers=2, projection_dim=WIDTH, **ENCODER, **ends)
    kind = ENCODERS.CLIPTextModelWithProjection if projected else ENCODERS.CLIPTextModel
    return random_weights(kind(config), seed)


def t5(seed: int, kind: str = "T5", width: int = WIDTH) -> Any:
    """Return the encoder of a T5 or UMT5."""
    layers = {"d_model": width, "d_kv": 8, "d_ff": WIDTH, "num_layers": 2, "num_heads": 4}
    config = getattr(ENCODERS, f"{kind}Config")(vocab_size=COUNT, **layers)
    return random_weights(getattr(ENCODERS, f"{kind}EncoderModel")(config), seed)


def decoder(seed: int, shift: float | None = 0.1, original: bool = False) -> Any:
    """Return an image autoencoder with 4 latent channels, 2 x 2 pixels each.

    original: whether it is one that an original file can hold, which says neither scale nor groups.
    """
    width, groups, scale = (32, 32, 0.18215) if original else (8, 4, 0.4)
    blocks = {"block_out_channels": (width, width), "latent_channels": 4, "norm_num_groups": groups, "sample_size": 16}
    return random_weights(THEIRS.AutoencoderKL(**STAGES, **blocks, scaling_factor=scale, shift_factor=shift), seed)


def flow(**options: Any) -> Any:
    """Return the scheduler of the flow models."""
    return THEIRS.FlowMatchEulerDiscreteScheduler(**options)


def flux(guidance_embeds: bool = True, kind: str = "FluxPipeline") -> Any:
    """Return a FLUX.1 pipeline; `kind` names another class of the same parts."""
    transformer = THEIRS.FluxTransformer2DModel(
        **sizes(HEAD_DIM, 16, num_single_layers=1, joint_attention_dim=WIDTH, axes_dims_rope=(2, 2, 4)),
        pooled_projection_dim=WIDTH,
        guidance_embeds=guidance_embeds,
    )
    texts = {"text_encoder": clip(2), "text_encoder_2": t5(3), "tokenizer": tokenizer(16), "tokenizer_2": tokenizer(16)}
    parts = {"scheduler": flow(), "vae": decoder(1), **texts, "transformer": random_weights(transformer, 4)}
    return quiet(getattr(THEIRS, kind)(**parts))


def chroma() -> Any:
    """Return a Chroma pipeline, which passes a mask of floating numbers for text and image."""
    transformer = THEIRS.ChromaTransformer2DModel(
        **sizes(HEAD_DIM, 16, num_layers=1, num_single_layers=1, joint_attention_dim=WIDTH, axes_dims_rope=(2, 2, 4)),
        **{"approximator_num_channels": 16, "approximator_hidden_dim": 8, "approximator_layers": 1},
    )
    parts = {"vae": decoder(1), "text_encoder": t5(3), "tokenizer": tokenizer(16), "scheduler": flow()}
    return quiet(THEIRS.ChromaPipeline(**parts, transformer=random_weights(transformer, 4)))


def cogvideox() -> Any:
    """Return a CogVideoX pipeline with rotary positions."""
    transformer = THEIRS.CogVideoXTransformer3DModel(
        **sizes(16, 4, out_channels=4, time_embed_dim=8, text_embed_dim=WIDTH, max_text_seq_length=16),
        **{"sample_width": 12, "sample_height": 8, "sample_frames": 9, "use_rotary_positional_embeddings": True},
    )
    stages = {"down_block_types": ("CogVideoXDownBlock3D",) * 2, "up_block_types": ("CogVideoXUpBlock3D",) * 2}
    blocks = {"block_out_channels": (8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    vae = THEIRS.AutoencoderKLCogVideoX(**stages, **blocks, temporal_compression_ratio=4)
    parts = {"vae": random_weights(vae, 1), "text_encoder": t5(3), "tokenizer": tokenizer(16)}
    scheduler = THEIRS.CogVideoXDPMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    return quiet(THEIRS.CogVideoXPipeline(**parts, transformer=random_weights(transformer, 4), scheduler=scheduler))


def auraflow() -> Any:
    """Return an AuraFlow pipeline, which doubles the batch for guidance."""
    transformer = THEIRS.AuraFlowTransformer2DModel(
        **{"sample_size": 16, "pos_embed_max_size": 64, "num_mmdit_layers": 1, "num_single_dit_layers": 1},
        **{"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "caption_projection_dim": HEADS * HEAD_DIM},
        joint_attention_dim=WIDTH,
    )
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(3, "UMT5"), "vae": decoder(1), "scheduler": flow()}
    return quiet(THEIRS.AuraFlowPipeline(**parts, transformer=random_weights(transformer, 4)))


def ovis_image() -> Any:
    """Return an Ovis-Image pipeline without a text encoder, which names the two calls of a step."""
    transformer = THEIRS.OvisImageTransformer2DModel(
        **sizes(HEAD_DIM, 16, num_single_layers=1, joint_attention_dim=WIDTH, axes_dims_rope=(2, 2, 4)), out_channels=16
    )
    parts = {"vae": decoder(1), "text_encoder": None, "tokenizer": None, "scheduler": flow()}
    return quiet(THEIRS.OvisImagePipeline(**parts, transformer=random_weights(transformer, 4)))


def ideogram4() -> Any:
    """Return an Ideogram 4 pipeline whose texts are random numbers; a second transformer computes the other branch."""
    sizes_of_both = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "num_layers": 2, "in_channels": 16}
    config = {**sizes_of_both, "intermediate_size": 24, "adaln_dim": 16, "llm_features_dim": WIDTH}
    models = [THEIRS.Ideogram4Transformer2DModel(**config, mrope_section=(2, 1, 1)) for _ in range(2)]
    vae = THEIRS.AutoencoderKLFlux2(**STAGES, block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4)
    names = ("transformer", "unconditional_transformer")
    both = {name: random_weights(model, seed) for seed, (name, model) in enumerate(zip(names, models, strict=True), 4)}
    parts = {"scheduler": flow(), "vae": random_weights(vae, 1), "text_encoder": None, "tokenizer": None}
    pipe = quiet(THEIRS.Ideogram4Pipeline(**parts, **both))

    def encoded(prompt: str, grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device) -> Any:
        ids = pipe._prepare_ids([7], grid_h, grid_w, max_sequence_length, device)
        return random((1, max_sequence_length + grid_h * grid_w, WIDTH), 3, device), *ids

    pipe.encode_prompt = encoded
    return pipe


def kandinsky5() -> Any:
    """Return a Kandinsky 5 pipeline of images without text encoders, which makes two calls a step without names."""
    transformer = THEIRS.Kandinsky5Transformer3DModel(
        **{"in_text_dim": WIDTH, "in_text_dim2": 16, "model_dim": 48, "ff_dim": 64, "axes_dims": (4, 6, 6)},
        **{"time_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2},
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    models = {"vae": decoder(1), "transformer": random_weights(transformer, 4)}
    pipe = quiet(THEIRS.Kandinsky5T2IPipeline(**parts, **models, scheduler=flow()))
    pipe.resolutions = [(48, 80)]
    return pipe


def sd3() -> Any:
    """Return a Stable Diffusion 3 pipeline with its three text encoders and dual attention."""
    transformer = THEIRS.SD3Transformer2DModel(
        **sizes(HEAD_DIM, 4, sample_size=16, patch_size=2, out_channels=4, pos_embed_max_size=16),
        **{"joint_attention_dim": 2 * WIDTH, "caption_projection_dim": 40, "pooled_projection_dim": 2 * WIDTH},
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    encoders = {"text_encoder": clip(2, True), "text_encoder_2": clip(3, True)}
    encoders["text_encoder_3"] = t5(4, width=2 * WIDTH)  # whose states are joined to those of both CLIP encoders
    tokenizers = {name: tokenizer(16) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
    model = random_weights(transformer, 5)
    return quiet(
        THEIRS.StableDiffusion3Pipeline(transformer=model, scheduler=flow(), vae=decoder(1), **encoders, **tokenizers)
    )


def pixart() -> Any:
    """Return a PixArt-alpha pipeline."""
    transformer = THEIRS.PixArtTransformer2DModel(
        **sizes(HEAD_DIM, 4, sample_size=16, patch_size=2, cross_attention_dim=40, caption_channels=WIDTH),
        out_channels=8,
        use_additional_conditions=False,
    )
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(4), "vae": decoder(1)}
    scheduler = THEIRS.DPMSolverMultistepScheduler()
    return quiet(THEIRS.PixArtAlphaPipeline(**parts, transformer=random_weights(transformer, 5), scheduler=scheduler))


WAN = sizes(12, 16, patch_size=(1, 2, 2), out_channels=16, text_dim=WIDTH, freq_dim=16, ffn_dim=32)
WAN |= {"cross_attn_norm": True, "rope_max_seq_len": 32}


def wan(experts: int = 1) -> Any:
    """Return a Wan pipeline; with two experts, one for early and one for late steps, as in Wan 2.2."""
    models = [THEIRS.WanTransformer3DModel(**WAN) for _ in range(experts)]
    vae = THEIRS.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    boundary = {"boundary_ratio": 0.875, "transformer_2": random_weights(models[1], 6)} if experts > 1 else {}
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(4, "UMT5"), "vae": random_weights(vae, 1)}
    model = random_weights(models[0], 5)
    return quiet(THEIRS.WanPipeline(**parts, transformer=model, scheduler=flow(), **boundary))


def wan_i2v() -> Any:
    """Return a Wan 2.1 pipeline that makes videos of a picture, with the encoder that its transformer attends to."""
    config = ENCODERS.CLIPVisionConfig(**ENCODER, num_hidden_layers=2, image_size=16, patch_size=8)
    inner = {"image_dim": WIDTH, "added_kv_proj_dim": 12 * HEADS, "in_channels": 36}
    texts = wan()
    return quiet(
        THEIRS.WanImageToVideoPipeline(
            **{name: getattr(texts, name) for name in ("tokenizer", "text_encoder", "vae")},
            scheduler=flow(),
            transformer=random_weights(THEIRS.WanTransformer3DModel(**{**texts.transformer.config, **inner}), 5),
            image_encoder=random_weights(ENCODERS.CLIPVisionModel(config), 6),
            image_processor=ENCODERS.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
        )
    )


def wan_animate() -> Any:
    """Return a Wan 2.2 Animate pipeline, which makes a video of a picture in segments, by the poses of two others."""
    sizes_of_faces = {"motion_encoder_channel_sizes": {"8": 6, "4": 6}, "image_dim": WIDTH, "text_dim": WIDTH}
    config = {**MODELS["wananimate"].config, **sizes_of_faces, "in_channels": 36, "latent_channels": 16}
    model = random_weights(THEIRS.WanAnimateTransformer3DModel(**{**config, "out_channels": 16}), 5)
    parts = {name: part for name, part in wan_i2v().components.items() if name != "transformer_2"}
    return quiet(THEIRS.WanAnimatePipeline(**{**parts, "transformer": model}))


def flux2_klein() -> Any:
    """Return a FLUX.2 klein pipeline, which makes pictures of texts and edits several pictures."""
    transformer = THEIRS.Flux2Transformer2DModel(
        **sizes(HEAD_DIM, 16, num_layers=1, num_single_layers=1, joint_attention_dim=3 * WIDTH),
        **{"timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2), "guidance_embeds": False},
    )
    layers = {"num_hidden_layers": 28, "head_dim": 8, "max_position_embeddings": 512}  # it reads the ninth and others
    config = ENCODERS.Qwen3Config(vocab_size=COUNT, **ENCODER, num_key_value_heads=2, **layers)
    vae = THEIRS.AutoencoderKLFlux2(**STAGES, block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4)
    words = tokenizer(512)
    words.chat_template = "{{ messages[0]['content'] }}"
    return quiet(
        THEIRS.Flux2KleinPipeline(
            scheduler=flow(),
            vae=random_weights(vae, 1),
            text_encoder=random_weights(ENCODERS.Qwen3ForCausalLM(config), 2),
            tokenizer=words,
            transformer=random_weights(transformer, 4),
            is_distilled=True,
        )
    )


def qwen_image() -> Any:
    """Return a Qwen-Image pipeline without a text encoder."""
    transformer = THEIRS.QwenImageTransformer2DModel(
        **sizes(HEAD_DIM, 64, patch_size=2, out_channels=16, joint_attention_dim=WIDTH, axes_dims_rope=(2, 2, 4))
    )
    parts = {"vae": qwen_image_vae(), "text_encoder": None, "tokenizer": None}
    return quiet(THEIRS.QwenImagePipeline(**parts, transformer=random_weights(transformer, 5), scheduler=flow()))


def qwen_image_vae() -> Any:
    """Return the autoencoder of Qwen-Image and Krea 2, with 16 latent channels, 2 x 2 pixels each."""
    blocks = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    scale = {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    return random_weights(THEIRS.AutoencoderKLQwenImage(**blocks, **scale), 1)


def z_image() -> Any:
    """Return a Z-Image pipeline without a text encoder, which shifts its sigmas as Turbo does."""
    transformer = THEIRS.ZImageTransformer2DModel(
        **{"in_channels": 4, "dim": HEADS * HEAD_DIM, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": WIDTH},
        **{"n_heads": HEADS, "n_kv_heads": HEADS, "axes_dims": [2, 2, 4], "axes_lens": [64, 32, 32]},
    )
    parts = {"vae": decoder(1), "text_encoder": None, "tokenizer": None, "scheduler": flow(shift=3.0)}
    return quiet(THEIRS.ZImagePipeline(**parts, transformer=random_weights(transformer, 5)))


def qwen_image_controlnet() -> Any:
    """Return a Qwen-Image pipeline whose two blocks get the residual of a ControlNet of one block."""
    pipe = qwen_image()
    net = random_weights(THEIRS.QwenImageControlNetModel.from_transformer(pipe.transformer, 1, HEAD_DIM, HEADS), 6)
    return quiet(THEIRS.QwenImageControlNetPipeline(**pipe.components, controlnet=net))


def z_image_controlnet() -> Any:
    """Return a Z-Image pipeline with a ControlNet, which shares the transformer's layers before its blocks."""
    net = THEIRS.ZImageControlNetModel(
        **{"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4},
        **{"add_control_noise_refiner": "control_noise_refiner", "dim": HEADS * HEAD_DIM, "n_refiner_layers": 1},
        **{"n_heads": HEADS, "n_kv_heads": HEADS},
    )
    return quiet(THEIRS.ZImageControlNetPipeline(**z_image().components, controlnet=random_weights(net, 6)))


def krea2() -> Any:
    """Return a Krea 2 pipeline without a text encoder, for prompts that are given as layers of embeddings."""
    text = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 20, "hidden_dim": WIDTH}
    transformer = THEIRS.Krea2Transformer2DModel(
        **sizes(HEAD_DIM, 64, num_attention_heads=6, num_key_value_heads=3, intermediate_size=24),
        **{f"text_{name}": size for name, size in text.items()},
        **{"num_text_layers": 3, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
        timestep_embed_dim=16,
        axes_dims_rope=(2, 2, 4),
    )
    parts = {"vae": qwen_image_vae(), "text_encoder": None, "tokenizer": None}
    return quiet(THEIRS.Krea2Pipeline(**parts, transformer=random_weights(transformer, 5), scheduler=flow()))


def hunyuan_video15() -> Any:
    """Return a HunyuanVideo 1.5 pipeline without text encoders."""
    transformer = THEIRS.HunyuanVideo15Transformer3DModel(
        **sizes(12, 9, out_channels=4, num_refiner_layers=1, text_embed_dim=WIDTH, text_embed_2_dim=8),
        image_embed_dim=16,
        rope_axes_dim=(4, 4, 4),
    )
    blocks = {"latent_channels": 4, "block_out_channels": (8, 8, 8), "layers_per_block": 1}
    vae = THEIRS.AutoencoderKLHunyuanVideo15(**blocks, spatial_compression_ratio=4, temporal_compression_ratio=4)
    parts = {**dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")), "scheduler": flow()}
    guider = THEIRS.ClassifierFreeGuidance(guidance_scale=3.0)
    models = {"vae": random_weights(vae, 1), "transformer": random_weights(transformer, 5)}
    return quiet(THEIRS.HunyuanVideo15Pipeline(**parts, **models, guider=guider))


LTX_VAE = {
    **{"latent_channels": 4, "patch_size": 4, "block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)},
    **{"down_block_types": ("LTXVideoDownBlock3D",) * 2, "downsample_type": ("conv",) * 2},
    **{"layers_per_block": (1,) * 3, "decoder_layers_per_block": (1,) * 3, "decoder_inject_noise": (False,) * 3},
    **{"spatio_temporal_scaling": (True, False), "decoder_spatio_temporal_scaling": (True, False)},
    **{"upsample_residual": (False,) * 2, "upsample_factor": (1,) * 2},
}


def ltx() -> Any:
    """Return an LTX-Video pipeline, which doubles the batch for guidance, with texts that are padded and masked."""
    transformer = THEIRS.LTXVideoTransformer3DModel(
        **sizes(HEAD_DIM, 4, out_channels=4, cross_attention_dim=HEADS * HEAD_DIM, caption_channels=WIDTH)
    )
    vae = random_weights(THEIRS.AutoencoderKLLTXVideo(**LTX_VAE), 1)
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(3), "vae": vae}
    return quiet(THEIRS.LTXPipeline(**parts, transformer=random_weights(transformer, 5), scheduler=flow()))


TOKENS = 16  # of a text, which fills the learned tokens of connectors without a rest
LTX2_TEXTS = {
    f"{name}prompt_{what}": value
    for seed, name in enumerate(("", "negative_"))
    for what, value in {
        "embeds": random((1, TOKENS, 2 * WIDTH), seed),
        "attention_mask": (torch.arange(TOKENS) >= 9 + 3 * seed)[None].long(),  # padding comes first
    }.items()
}


def ltx2() -> Any:
    """Return a pipeline of LTX-2.3 without a text encoder; `LTX2_TEXTS` are prompts."""
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
    both = {"in_channels": 4, "out_channels": 4, **heads, "cross_attention_dim": HEADS * HEAD_DIM}
    both |= {"gated_attn": True, "cross_attn_mod": True}
    transformer = THEIRS.LTX2VideoTransformer3DModel(
        **{f"{name}{key}": value for name in ("", "audio_") for key, value in both.items()},
        **{"num_layers": 2, "rope_type": "split", "use_prompt_embeddings": False, "perturbed_attn": True},
    )
    both = {**heads, "num_layers": 1, "num_learnable_registers": 8}
    connectors: Any = LTX2TextConnectors
    hidden = {f"{name}_hidden_dim": HEADS * HEAD_DIM for name in ("video", "audio")}
    connectors = connectors(
        **{f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in both.items()},
        **{"caption_channels": WIDTH, "text_proj_in_factor": 2, "per_modality_projections": True, **hidden},
        rope_type="split",
    )
    vae = {
        **{"latent_channels": 4, "block_out_channels": (8,), "decoder_block_out_channels": (8,), "patch_size": 4},
        **{"down_block_types": ("LTX2VideoDownBlock3D",), "decoder_inject_noise": (False, False)},
        **{"layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1), "spatio_temporal_scaling": (True,)},
        **{"decoder_spatio_temporal_scaling": (True,), "downsample_type": ("spatial",)},
        **{"upsample_type": ("spatial",), "upsample_residual": (False,), "upsample_factor": (1,)},
    }
    sound = {"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "latent_channels": 2}
    waves: dict[str, Any] = {"upsample_kernel_sizes": [4], "upsample_factors": [2]}
    waves |= {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    parts = {
        "transformer": transformer,
        "connectors": connectors,
        "vae": THEIRS.AutoencoderKLLTX2Video(**vae),
        "audio_vae": THEIRS.AutoencoderKLLTX2Audio(**sound, resolution=16, mel_bins=8),
        "vocoder": LTX2Vocoder(in_channels=16, hidden_channels=8, **waves),
    }
    seeded = {name: random_weights(part, seed) for seed, (name, part) in enumerate(parts.items())}
    return quiet(THEIRS.LTX2Pipeline(**seeded, text_encoder=None, tokenizer=None, scheduler=flow()))


def unidiffuser(version_1: bool = True, original: bool = False) -> Any:
    """Return a UniDiffuser pipeline of either version, with every part that a downloaded one has.

    original: whether it has sizes that the authors' own files can have: 77 text tokens and heads of 64.
    """
    from diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder import UniDiffuserTextDecoder

    tokens, heads, head_dim, layers = (77, 1, 64, 2) if original else (16, HEADS, HEAD_DIM, 5)
    unet = THEIRS.UniDiffuserModel(
        **{"text_dim": 6, "clip_img_dim": 5, "num_text_tokens": tokens, "sample_size": 8, "patch_size": 2},
        **sizes(head_dim, 4, num_attention_heads=heads, num_layers=layers, out_channels=4),
        activation_fn="gelu",
        use_data_type_embedding=version_1,
    )
    prefix: dict[str, Any] = {"prefix_length": tokens, "prefix_inner_dim": WIDTH, "prefix_hidden_dim": 6}
    captions = UniDiffuserTextDecoder(**prefix, vocab_size=COUNT, n_embd=WIDTH, n_layer=2, n_head=4)
    head: Any = captions.transformer.lm_head  # safetensors writes no tensor twice, as tied weights would be
    head.weight = nn.Parameter(head.weight.detach().clone())
    vision = ENCODERS.CLIPVisionConfig(**ENCODER, num_hidden_layers=2, projection_dim=5, image_size=8, patch_size=4)
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return quiet(
        THEIRS.UniDiffuserPipeline(
            vae=decoder(1, None, original),
            text_encoder=clip(2, tokens=tokens),
            image_encoder=random_weights(ENCODERS.CLIPVisionModelWithProjection(vision), 3),
            clip_image_processor=ENCODERS.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8),
            clip_tokenizer=tokenizer(tokens),
            text_decoder=random_weights(captions, 4),
            text_tokenizer=tokenizer(tokens),
            unet=random_weights(unet, 5),
            scheduler=THEIRS.DPMSolverMultistepScheduler(**betas, solver_order=3),
        )
    )


def quiet(pipe: Any) -> Any:
    """Return a pipeline that prints no progress."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> Any:
    """Return a generator, or a list of generators, one for each picture."""
    made = [torch.Generator().manual_seed(seed) for seed in seeds]
    return made[0] if len(made) == 1 else made
