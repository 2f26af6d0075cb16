"""Diffusion transformers as plain modules that know nothing about ranks, one file a model.

Each file exports `Config`, `Model`, `SIZES` (name -> config), `recognise` (from a folder's shapes and config.json to
a `Config`, or None), `key_map` (the folder's keys, from a `Config`) and `work` (the cost of a token, for the planner).
"""
