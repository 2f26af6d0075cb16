"""The page at `/`, by which people make pictures in a browser: one file, which asks the same interface as any client.

Its policy lets run and style what stands in that file, by the hashes of its text, and nothing else: no script that
comes in by a prompt or a name, no other host, no frame around it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import Response

PACKAGE, FILE = "seqpar.serve.front", "page.html"


async def page() -> Response:
    """Return the page, which is the same for everyone and holds no secret: it asks for the key itself."""
    text = (files(PACKAGE) / FILE).read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


def _policy(text: str) -> str:
    """Return the content security policy of a page whose script and style stand in it."""
    parts = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # a text can become no markup by any function of the browser
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(text: str, tag: str) -> str:
    """Return the source that allows the one element of this tag."""
    (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
