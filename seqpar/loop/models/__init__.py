"""Diffusion transformers as plain modules that know nothing about ranks, one file a model.

Each file exports `Config`, `Model`, `PRESETS` (name -> config), `KEY_MAPS` (name -> function of a config), `recognise`
(from a checkpoint's shapes and config to a `Config`) and `work` (the cost of a token, for the planner).
"""
