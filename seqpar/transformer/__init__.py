"""The adapter: runs diffusers transformers and pipelines sharded, in place and with their own weights."""
