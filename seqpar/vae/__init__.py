"""The decoder that turns latents into pixels."""
