"""The decoder from latents to pixels."""
