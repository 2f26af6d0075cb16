# Its own file imports the modules of 500 models, which takes most of pyright's time.

from typing import Any

def __getattr__(name: str) -> Any: ...
