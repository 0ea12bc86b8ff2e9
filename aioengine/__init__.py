"""aioengine: every rank is one process that the launcher started.

    from aioengine import AsyncEngine, EngineConfig, SamplingParams

The first of them brings torch, so it is imported when somebody asks for it.
"""

import importlib
from typing import Any

from aioengine.config import EngineConfig
from aioengine.frontend.sampling import SamplingParams

__all__ = ["AsyncEngine", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "AsyncEngine":
        return importlib.import_module("aioengine.embedded.engine").AsyncEngine
    raise AttributeError(f"module 'aioengine' has no attribute {name!r}")
