"""The denoising loop: a run with its schedule, guidance and CUDA graph."""
