"""Tiny diffusers pipelines with random weights: text encoders, tokenizers and decoders are made here, nothing is read.

They are diffusers' own pipeline classes, with every part that a downloaded one has; only sizes and weights differ.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

WORDS = ("blurry", "a", "the", "red", "blue", "old", "cat", "house", "sea", "on", "of")
THEIRS: Any = diffusers  # pyright does not see what these packages import lazily
ENCODERS: Any = transformers
SPECIAL = ("<pad>", "<unk>", "<eos>")
WIDTH = 32  # of text encoders
HEADS, HEAD_DIM = 5, 8  # five heads do not divide by two, three or four ranks


def tokenizer(length: int) -> Any:
    """Return a tokenizer of whole words that ends texts with <eos>, for texts of up to `length` tokens."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL[:2], *WORDS, SPECIAL[2]))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    end = vocabulary["<eos>"]
    made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", end)])
    return ENCODERS.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", model_max_length=length
    )


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
    count = len(WORDS) + len(SPECIAL)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "projection_dim": WIDTH, "num_attention_heads": 4}
    ends = {"eos_token_id": count - 1, "bos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": tokens}
    config = ENCODERS.CLIPTextConfig(vocab_size=count, num_hidden_layers=2, **sizes, **ends)
    kind = ENCODERS.CLIPTextModelWithProjection if projected else ENCODERS.CLIPTextModel
    return random_weights(kind(config), seed)


def t5(seed: int, kind: str = "T5") -> Any:
    """Return the encoder of a T5 or UMT5."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 2, "num_heads": 4}
    config = getattr(ENCODERS, f"{kind}Config")(vocab_size=len(WORDS) + len(SPECIAL), **sizes)
    return random_weights(getattr(ENCODERS, f"{kind}EncoderModel")(config), seed)


def decoder(seed: int, shift: float | None = 0.1, original: bool = False) -> Any:
    """Return an image autoencoder with 4 latent channels, 2 x 2 pixels each.

    original: whether it is one that an original file can hold, which says neither scale nor groups.
    """
    stages = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "latent_channels": 4, "norm_num_groups": 4, "sample_size": 16}
    if original:
        sizes |= {"block_out_channels": (32, 32), "norm_num_groups": 32}
    scale = 0.18215 if original else 0.4
    vae = THEIRS.AutoencoderKL(**stages, **sizes, scaling_factor=scale, shift_factor=shift)
    return random_weights(vae, seed)


def flow(**options: Any) -> Any:
    """Return the scheduler of the flow models."""
    return THEIRS.FlowMatchEulerDiscreteScheduler(**options)


def flux(guidance_embeds: bool = True, kind: str = "FluxPipeline") -> Any:
    """Return a FLUX.1 pipeline; `kind` names another class of the same parts."""
    transformer = THEIRS.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(2, 2, 4),
    )
    return quiet(
        getattr(THEIRS, kind)(
            scheduler=flow(),
            vae=decoder(1),
            text_encoder=clip(2),
            tokenizer=tokenizer(16),
            text_encoder_2=t5(3),
            tokenizer_2=tokenizer(16),
            transformer=random_weights(transformer, 4),
        )
    )


def sd3() -> Any:
    """Return a Stable Diffusion 3 pipeline with its three text encoders and dual attention."""
    transformer = THEIRS.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=HEADS * HEAD_DIM,
        pooled_projection_dim=2 * WIDTH,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    encoders = {"text_encoder": clip(2, True), "text_encoder_2": clip(3, True), "text_encoder_3": wide(t5(4))}
    tokenizers = {name: tokenizer(16) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
    model = random_weights(transformer, 5)
    return quiet(
        THEIRS.StableDiffusion3Pipeline(transformer=model, scheduler=flow(), vae=decoder(1), **encoders, **tokenizers)
    )


def pixart() -> Any:
    """Return a PixArt-alpha pipeline."""
    transformer = THEIRS.PixArtTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        cross_attention_dim=HEADS * HEAD_DIM,
        caption_channels=WIDTH,
        in_channels=4,
        out_channels=8,
        use_additional_conditions=False,
    )
    model = random_weights(transformer, 5)
    scheduler = THEIRS.DPMSolverMultistepScheduler()
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(4), "vae": decoder(1)}
    return quiet(THEIRS.PixArtAlphaPipeline(**parts, transformer=model, scheduler=scheduler))


def wan(experts: int = 1) -> Any:
    """Return a Wan pipeline; with two experts, one for early and one for late steps, as in Wan 2.2."""
    models = [
        THEIRS.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=HEADS,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
        for _ in range(experts)
    ]
    vae = THEIRS.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    boundary = {"boundary_ratio": 0.875, "transformer_2": random_weights(models[1], 6)} if experts > 1 else {}
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(4, "UMT5"), "vae": random_weights(vae, 1)}
    model = random_weights(models[0], 5)
    return quiet(THEIRS.WanPipeline(**parts, transformer=model, scheduler=flow(), **boundary))


def qwen_image() -> Any:
    """Return a Qwen-Image pipeline without a text encoder, for prompts that are given as embeddings."""
    transformer = THEIRS.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(2, 2, 4),
    )
    vae = THEIRS.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    parts = {"vae": random_weights(vae, 1), "text_encoder": None, "tokenizer": None}
    return quiet(THEIRS.QwenImagePipeline(**parts, transformer=random_weights(transformer, 5), scheduler=flow()))


def unidiffuser(version_1: bool = True, original: bool = False) -> Any:
    """Return a UniDiffuser pipeline of either version, with every part that a downloaded one has.

    original: whether it has sizes that the authors' own files can have: 77 text tokens and heads of 64.
    """
    from diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder import UniDiffuserTextDecoder

    tokens, heads, head_dim, layers = (77, 1, 64, 2) if original else (16, HEADS, HEAD_DIM, 5)
    unet = THEIRS.UniDiffuserModel(
        text_dim=6,
        clip_img_dim=5,
        num_text_tokens=tokens,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu",
        use_data_type_embedding=version_1,
    )
    count = len(WORDS) + len(SPECIAL)
    captions = UniDiffuserTextDecoder(
        prefix_length=tokens,
        prefix_inner_dim=WIDTH,
        prefix_hidden_dim=6,
        vocab_size=count,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
    )
    head: Any = captions.transformer.lm_head  # safetensors writes no tensor twice, as tied weights would be
    head.weight = nn.Parameter(head.weight.detach().clone())
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    vision = ENCODERS.CLIPVisionConfig(**sizes, projection_dim=5, image_size=8, patch_size=4)
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
            scheduler=THEIRS.DPMSolverMultistepScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", solver_order=3
            ),
        )
    )


def wide(encoder: Any) -> Any:
    """Return a T5 encoder whose states are twice as wide, as Stable Diffusion 3 joins them to two CLIP encoders'."""
    sizes = {"d_model": 2 * WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 2, "num_heads": 4}
    config = ENCODERS.T5Config(vocab_size=encoder.config.vocab_size, **sizes)
    return random_weights(ENCODERS.T5EncoderModel(config), 4)


def quiet(pipe: Any) -> Any:
    """Return a pipeline that prints no progress."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> Any:
    """Return a generator, or a list of generators, one for each picture."""
    made = [torch.Generator().manual_seed(seed) for seed in seeds]
    return made[0] if len(made) == 1 else made
