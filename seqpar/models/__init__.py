"""Diffusion transformers that know nothing of ranks; one model = one file.

A file exports `Config`, `Model`, `PRESETS` (name -> config), `KEY_MAPS` (name -> function of a config), `recognise`,
`work` (what a token costs, for the planner).
"""
