"""An exact, readable, CPU-runnable reconstruction of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from v41lib.checkpoint import CheckpointError, load, load_layer, save
    from v41lib.config import Config, TextConfig, VisionConfig, preset, released
    from v41lib.model import Encoded, Model
    from v41lib.plan import LayerPlan, plan_layers

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Config",
    "Encoded",
    "LayerPlan",
    "Model",
    "TextConfig",
    "VisionConfig",
    "load",
    "load_layer",
    "plan_layers",
    "preset",
    "released",
    "save",
]
_HOMES = {
    "checkpoint": ("CheckpointError", "load", "load_layer", "save"),
    "config": ("Config", "TextConfig", "VisionConfig", "preset", "released"),
    "model": ("Encoded", "Model"),
    "plan": ("LayerPlan", "plan_layers"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `v41 --help` must not wait for torch."""
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
