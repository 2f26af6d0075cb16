"""Compares runs of one model: how far every way of computing it is from one rank in full precision."""
