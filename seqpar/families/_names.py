"""Arguments that a call passes to a transformer's forward in addition to the forward's own."""

from __future__ import annotations

FULL = "full_masks"  # an argument beside the transformer's own: the names of the masks that it needs, but no attention
PADDING = "weighed_padding"  # another one: how many tokens at the end of a text are padding that attention weighs
