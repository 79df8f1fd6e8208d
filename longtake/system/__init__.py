"""What a run is made of: denoiser, encoders and objective put together from the config and placed on the mesh."""

from longtake.system.build import Encoders, System, build_encoders, build_system, compute_dtype
from longtake.system.config import SamplingOption, SystemConfig
from longtake.system.export import export_model, exported_tree

__all__ = [
    "Encoders",
    "SamplingOption",
    "System",
    "SystemConfig",
    "build_encoders",
    "build_system",
    "compute_dtype",
    "export_model",
    "exported_tree",
]
