"""What a run is made of: denoiser, encoders and objective put together from the config and placed on the mesh."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.system.build import System, build_system, compiles
    from longtake.system.caption_lengths import caption_length_lines, lost_words
    from longtake.system.config import SamplingOption, SystemConfig, unknown_name
    from longtake.system.convert import convert_weights
    from longtake.system.encoders import (
        CaptionEncoders,
        Encoders,
        build_encoders,
        empty_texts,
        encoder_bytes,
        encoders_on_host,
        find_encoders,
        flat_captions,
        missing_files,
        raise_missing,
        refuse_sharded_text,
        set_tf32,
    )
    from longtake.system.examples import (
        KnownDraw,
        any_masked,
        black_out,
        clean_example,
        companion_conditions,
        kinds_apart,
        stored_windows,
        wanted_draws,
        windows_apart,
        windows_of,
        with_drawn_noise,
    )
    from longtake.system.export import (
        export_adapters,
        export_folder,
        export_merged,
        export_model,
        exported_tree,
        is_exported_folder,
        said_sampling,
        trained_shapes,
        trained_size,
    )
    from longtake.system.room import fits_at_once

__getattr__ = lazy_exports(__name__)
