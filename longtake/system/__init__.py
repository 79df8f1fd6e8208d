"""What a run is made of: denoiser, encoders and objective put together from the config and placed on the mesh."""

from longtake.system.adapters import export_adapters, export_merged
from longtake.system.build import System, build_system, compute_dtype
from longtake.system.config import SamplingOption, SystemConfig
from longtake.system.encoders import (
    CaptionEncoders,
    Encoders,
    build_encoders,
    encoder_bytes,
    encoders_on_host,
    find_encoders,
    refuse_sharded_text,
)
from longtake.system.export import export_model, exported_tree, is_exported_folder
from longtake.system.known_frames import add_known_frames, kinds_apart, stored_windows, windows_apart, windows_of
from longtake.system.room import fits_at_once
from longtake.system.trained_size import said_sampling, trained_size

__all__ = [
    "CaptionEncoders",
    "Encoders",
    "SamplingOption",
    "System",
    "SystemConfig",
    "add_known_frames",
    "build_encoders",
    "build_system",
    "compute_dtype",
    "encoder_bytes",
    "encoders_on_host",
    "export_adapters",
    "export_merged",
    "export_model",
    "exported_tree",
    "find_encoders",
    "fits_at_once",
    "is_exported_folder",
    "kinds_apart",
    "refuse_sharded_text",
    "said_sampling",
    "stored_windows",
    "trained_size",
    "windows_apart",
    "windows_of",
]
