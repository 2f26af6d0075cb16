"""The denoising loop: one run, its schedule, guidance and CUDA graph."""
