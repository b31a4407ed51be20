"""StreamingDataLoader: the one of torch where that is installed, or else the light one; torch is imported when it is asked for."""

from __future__ import annotations

import importlib.util
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "StreamingDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        from liveset.read import lightloader

        return lightloader.StreamingDataLoader
    from liveset.read import torchloader

    return torchloader.StreamingDataLoader
