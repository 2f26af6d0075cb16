# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""The built-in model's two networks: shapes, initial weights, losses, and the folder they are saved in.

`train_builtin.py` has the training loop and the data; this file has what is trained.

Legend: B batch, C channels, H and W pixels or latent positions, T diffusion times.
"""

import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from torch import Tensor, nn

PIXELS = 64
NULL_CLASS = 1000  # fixed by diffusers' DiTPipeline
KL_WEIGHT = 5e-4  # per latent value; 4e-5 in the usual sums over pixels and latents
SNR_LIMIT = 5.0


def autocast(device: torch.device) -> torch.autocast:
    """Return bfloat16 autocast on CUDA, and disabled autocast on CPUs, which only tests use."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def build_vae() -> AutoencoderKL:
    """Return a VAE of 0.8 M parameters that maps 64x64 pixels to 16x16 latents with 4 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 48, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=PIXELS,
        force_upcast=False,
        mid_block_add_attention=False,
    )


def encode(vae: AutoencoderKL, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance of the unscaled latents."""
    with autocast(images.device):
        moments = vae.quant_conv(vae.encoder(images))
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean, logvar.clamp(-30, 20)


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Return the pictures of unscaled latents."""
    with autocast(latents.device):
        return vae.decoder(vae.post_quant_conv(latents)).float()


def vae_loss(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Return the sum of L1 at three sizes, L1 of the picture's gradients (for sharp edges), and a small KL term."""
    mean, logvar = encode(vae, images)
    found = decode(vae, mean + (0.5 * logvar).exp() * torch.randn_like(mean))
    error = found - images
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    sizes = sum(F.avg_pool2d(error, size).abs().mean() for size in (1, 2, 4))
    slopes = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    return sizes + slopes + KL_WEIGHT * kl


@torch.no_grad()
def centre_latents(vae: AutoencoderKL, images: Tensor) -> None:
    """Give all latent channels mean zero and equal spread by changing the 1x1 convolutions around them."""
    mean, _ = encode(vae, images)
    shift, spread = mean.mean((0, 2, 3)), mean.std((0, 2, 3))
    ratio = spread / spread.square().mean().sqrt()
    into, out = vae.quant_conv, vae.post_quant_conv
    into.bias[:4] = (into.bias[:4] - shift) / ratio
    into.weight[:4] /= ratio[:, None, None, None]
    into.bias[4:] -= 2 * ratio.log()
    out.bias += out.weight[:, :, 0, 0] @ shift
    out.weight *= ratio[None, :, None, None]
    vae.register_to_config(scaling_factor=1 / spread.square().mean().sqrt().item())


def build_dit() -> DiTTransformer2DModel:
    """Return a DiT of 4.9 M parameters; a third of them are label tables that diffusers repeats in every block."""
    return DiTTransformer2DModel(
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=7,
        sample_size=PIXELS // 4,
        patch_size=2,
        num_embeds_ada_norm=NULL_CLASS,
    )


def prepare_dit(model: DiTTransformer2DModel) -> None:
    """Set DiT's initial weights, and share one embedder between all blocks: seven would learn the same function."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    patch = model.pos_embed.proj
    nn.init.xavier_uniform_(patch.weight.view(patch.weight.shape[0], -1))
    nn.init.zeros_(patch.bias)
    shared = model.transformer_blocks[0].norm1.emb
    for table in (shared.timestep_embedder.linear_1, shared.timestep_embedder.linear_2):
        nn.init.normal_(table.weight, std=0.02)
    nn.init.normal_(shared.class_embedder.embedding_table.weight, std=0.02)
    shared.class_embedder.dropout_prob = 0.0  # `LatentPool.draw` drops labels
    for block in model.transformer_blocks:
        block.norm1.emb = shared
    # Every block starts as the identity, and the prediction starts at zero.
    modulations = [block.norm1.linear for block in model.transformer_blocks]
    for layer in [*modulations, model.proj_out_1, model.proj_out_2]:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def unshare_embedder(model: DiTTransformer2DModel, classes: int) -> None:
    """Give every block its own embedder, as the format needs; untrained labels become zeros, which compress well."""
    shared = model.transformer_blocks[0].norm1.emb
    with torch.no_grad():
        shared.class_embedder.embedding_table.weight[classes:NULL_CLASS] = 0
    for block in model.transformer_blocks:
        block.norm1.emb = copy.deepcopy(shared)


def dit_loss(
    model: DiTTransformer2DModel, latents: Tensor, noise: Tensor, times_B: Tensor, labels_B: Tensor, kept_T: Tensor
) -> Tensor:
    """Return the min-SNR weighted squared error of the noise; `kept_T` is the scheduler's alphas_cumprod."""
    kept = kept_T[times_B][:, None, None, None]
    noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
    with autocast(latents.device):
        found = model(noisy, timestep=times_B, class_labels=labels_B, return_dict=False)[0]
    weight = (SNR_LIMIT * (1 - kept) / kept).clamp(max=1)
    return (weight * (found.float() - noise).square()).mean()


def build_scheduler() -> DDIMScheduler:
    return DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False)


def save_folder(
    out: Path, vae: AutoencoderKL, dit: DiTTransformer2DModel, scheduler: DDIMScheduler, names: tuple[str, ...]
) -> None:
    """Save half-precision weights; the label names go where DiTPipeline looks for them."""
    vae = vae.to(memory_format=torch.contiguous_format)
    DiTPipeline(transformer=dit.half(), vae=vae.half(), scheduler=scheduler).save_pretrained(out)
    index = out / "model_index.json"
    content = json.loads(index.read_text()) | {"id2label": {str(i): name for i, name in enumerate(names)}}
    index.write_text(json.dumps(content, indent=2) + "\n")
    for weights in out.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes files that only their owner can read
