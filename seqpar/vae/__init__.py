"""The VAE of a pipeline on all ranks: latents become pixels, and pictures latents, whole or in strips."""
