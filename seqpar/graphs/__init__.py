"""Calls as CUDA graphs, their signatures, cached exchanges, deferred results."""
