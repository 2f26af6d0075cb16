"""Nodes of ComfyUI that generate images and videos on a server of seqpar (`seqpar serve`)."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .nodes import NODES


class SeqparExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*NODES]


async def comfy_entrypoint() -> SeqparExtension:
    return SeqparExtension()
