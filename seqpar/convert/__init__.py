"""Checkpoints in their authors' formats, read and written as folders of safetensors."""
