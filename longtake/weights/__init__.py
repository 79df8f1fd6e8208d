"""Weight files: safetensors read when asked for, and one file for each kind of model that maps its names to ours."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.weights.adapters import (
        Adapter,
        Adapters,
        adapters_of,
        convert_adapters,
        merged,
        summed,
        tensors_of,
    )
    from longtake.weights.conversion import ConvertedWeights, layer_names, state_shapes
    from longtake.weights.files import (
        INDEX_FILE,
        MOST_FILE_BYTES,
        WeightFiles,
        find_denoiser,
        save_weights,
    )
    from longtake.weights.format import STEM_OF_DIFFUSERS, Format
    from longtake.weights.lora import (
        check_style,
        count_text_encoder_tensors,
        find_adapters,
        read_adapters,
        save_adapters,
    )
    from longtake.weights.model import ModelWeights
    from longtake.weights.torch_folder import save_torch_folder
    from longtake.weights.training_folder import TrainingFolder

__getattr__ = lazy_exports(__name__)
