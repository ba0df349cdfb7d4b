"""An exact, readable, CPU-runnable reconstruction of DeepSeek-V4.1-Flash."""

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
