"""Config sections of the autoencoders (`ae`), and what the sections of all encoders share.

`content()` of a section is what decides the encoder's output: where its weights are and how they are kept in memory is
left out.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from longtake.config.section import OpenSection, Section
from longtake.contracts import LatentShape, UserError
from longtake.hub import published_facts

Dtype = Literal["bf16", "fp16", "fp32"]
Placement = Literal["resident", "offloaded"]

FROM = "local path, or the name of weights on the Hugging Face hub: owner/name, or owner/name/file.safetensors"
AUTOENCODER_FILE = "autoencoder.safetensors"  # of a fitted one, in the folder of a run or of a latent store
_MOST_HEADER = 1 << 20  # bytes of the header of a file of a fitted autoencoder
CACHE = "folder for files from the hub; None: the hub's own cache"


class EncoderSection(Section):
    """Base of all encoders' sections."""

    WHEREABOUTS: ClassVar[frozenset[str]] = frozenset({"from_pretrained", "cache_dir", "placement", "compile"})

    def content(self) -> dict[str, Any]:
        """Return the keys and values, fit for JSON, that an encoder's output depends on."""
        return self.model_dump(mode="json", exclude=set(self.WHEREABOUTS))


class AutoencoderSection(EncoderSection, OpenSection):
    """Base of all autoencoders' sections. A learned one's has `from_pretrained` and `cache_dir` too, and may have
    `dtype` and `placement`."""

    # "module:class" or function, called with (section, dtype); a learned one is on the meta device
    AUTOENCODER: ClassVar[str]

    type: str = Field(description="the autoencoder")

    @property
    @abstractmethod
    def latent(self) -> LatentShape:
        """How pixels map to latents."""

    @abstractmethod
    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for pixels that the autoencoder cannot give back; nothing is built for it."""

    @property
    def scale(self) -> float:
        """The factor on latents of the weights as they were published."""
        return getattr(self, "scale_factor", 1.0)

    @property
    def ceiling(self) -> str | None:
        """A line on the best that videos can look like, of one that is fitted on the clips of a run."""
        return None

    @property
    def is_random(self) -> bool:
        """True where latents are drawn from a posterior."""
        return getattr(self, "posterior", "mode") == "sample"

    def refuse_sides(self, place: str, cells: str, height: int, width: int) -> None:
        """Raise `UserError`, beginning with `place`, for sides that do not divide into whole latent cells."""
        spatial = self.latent.spatial
        if height % spatial or width % spatial:
            raise UserError(
                f"{place}: {height}x{width} pixels do not divide into {cells}; "
                f"choose sides that are multiples of {spatial}"
            )

    def has_length(self, num_frames: int) -> bool:
        """Return True where it can give back clips of so many frames."""
        try:
            self.check(num_frames, self.latent.spatial, self.latent.spatial)
        except UserError:
            return False
        return True


class PixelConfig(AutoencoderSection):
    """A lossless space-time patching: nothing is learned or downloaded."""

    AUTOENCODER: ClassVar[str] = "longtake.encoders.pixel:PixelAutoencoder"

    type: Literal["pixel"] = Field("pixel", description="the autoencoder; `pixel` folds pixels into channels, exactly")
    temporal: int = Field(8, ge=1, description="frames in one latent frame")
    spatial: int = Field(8, ge=1, description="pixels along one side of a latent cell")
    overlap: bool = Field(False, description="blocks of a frame overlap by half, so that no edges show between them")
    scaling_factor: float = Field(1.0, gt=0, description="latents are multiplied by this")

    @property
    def latent(self) -> LatentShape:
        return LatentShape(3 * self.temporal * self.spatial**2, self.temporal, self.spatial, causal=False)

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for a shape that does not divide into whole blocks; a shorter clip fills one in time."""
        if num_frames > self.temporal and num_frames % self.temporal:
            raise UserError(
                f"ae.temporal = {self.temporal}: {num_frames} frames do not divide into whole blocks; "
                f"choose at most {self.temporal} or a multiple of it as the frames of a bucket or video"
            )
        self.refuse_sides(f"ae.spatial = {self.spatial}", "whole blocks", height, width)


class LinearConfig(AutoencoderSection):
    """Principal components of space-time blocks of the run's own clips, fitted before the first step."""

    AUTOENCODER: ClassVar[str] = "longtake.encoders.linear:LinearAutoencoder"

    type: Literal["linear"] = Field("linear", description="principal components of blocks, fitted on the run's clips")
    from_pretrained: str | None = Field(
        None, description="file of a fitted one; None: the run's own, which is fitted before the first step"
    )
    cache_dir: str | None = Field(None, description=CACHE)
    channels: int = Field(192, ge=1, description="components of a block: channels of a latent cell")
    temporal: int = Field(8, ge=1, description="frames in one latent frame")
    spatial: int = Field(8, ge=1, description="pixels along one side of a latent cell")
    first_alone: bool = Field(
        False, description="the first frame is a latent frame by itself, for families of 4k+1 frames (temporal = 4)"
    )
    overlap: bool = Field(True, description="blocks overlap by half, so that no edges show between them")
    whitening: float = Field(
        0.5,
        ge=0,
        le=1,
        description="a component is divided by its standard deviation to this power: 1 makes all alike, 0 keeps pixels",
    )

    @model_validator(mode="after")
    def _few_enough(self) -> LinearConfig:
        size = self.frame_size if self.first_alone else self.block_size
        if self.channels > size:
            raise ValueError(f"ae.channels = {self.channels}: a block has {size} numbers; choose fewer")
        return self

    @property
    def frame_size(self) -> int:
        """Numbers of a block of one frame."""
        return 3 * self.spatial**2

    @property
    def block_size(self) -> int:
        """Numbers of a block."""
        return self.temporal * self.frame_size

    @property
    def latent(self) -> LatentShape:
        return LatentShape(self.channels, self.temporal, self.spatial, causal=self.first_alone)

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for a shape that does not divide into whole blocks; a shorter clip fills one in time."""
        first, place = int(self.first_alone), f"ae.temporal = {self.temporal}"
        rest = num_frames - first
        if self.first_alone and rest % self.temporal:
            below = rest // self.temporal * self.temporal + 1
            raise UserError(
                f"{place}: {num_frames} frames are not {self.temporal}k+1; choose {below} or {below + self.temporal} "
                "as the frames of a bucket or video"
            )
        if rest > self.temporal and rest % self.temporal:
            raise UserError(
                f"{place}: {num_frames} frames do not divide into whole blocks; choose at most {self.temporal} or a "
                "multiple of it as the frames of a bucket or video"
            )
        self.refuse_sides(f"ae.spatial = {self.spatial}", "whole blocks", height, width)

    def fitted(self) -> dict[str, Any] | None:
        """Return the facts of the fit, from the header of its file: "psnr", "worst_psnr", "clips", "held_out"; None
        without a file on this machine."""
        if self.from_pretrained is None:
            return None
        path = Path(self.from_pretrained).expanduser()
        return _facts(path, path.stat().st_mtime_ns) if path.is_file() else None

    @property
    def ceiling(self) -> str:
        facts = self.fitted()
        if facts is None:
            return "linear autoencoder: fitted before the first step, which shows the PSNR of its round trip"
        return (
            f"linear autoencoder: {facts['psnr']:.1f} dB PSNR of a round trip, {facts['worst_psnr']:.1f} dB the worst "
            f"of {facts['held_out']} held-out clips: videos of the run can look no better"
        )


@lru_cache(maxsize=8)
def _facts(path: Path, _changed: int) -> dict[str, Any] | None:
    """Return the value of "fit" in the header of a safetensors file, read without PyTorch."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= _MOST_HEADER else b""
    try:
        return json.loads(json.loads(header)["__metadata__"]["fit"])
    except (ValueError, KeyError, TypeError):
        return None


def fitted_layer(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys that a run's config, as plain data, leaves to its folder: where its fitted autoencoder is,
    wherever the folder has been moved to."""
    ae, file = tree.get("ae"), folder / AUTOENCODER_FILE
    is_linear = isinstance(ae, Mapping) and ae.get("type") == "linear" and ae.get("from_pretrained") is None
    return {"ae": {"from_pretrained": str(file)}} if is_linear and file.is_file() else {}


class KLSection(AutoencoderSection):
    """Base of the sections of learned autoencoders with a normal posterior."""

    AUTOENCODER: ClassVar[str] = "longtake.encoders.kl:build_kl"

    cache_dir: str | None = Field(None, description=CACHE)
    posterior: Literal["sample", "mode"] = Field(
        "sample", description="`sample` draws latents from the posterior, `mode` takes its mean"
    )
    dtype: Dtype = Field("bf16", description="compute dtype; float32 on a CPU without bf16 instructions")
    placement: Placement = Field("resident", description="`offloaded`: in the host's memory between uses")
    compile: bool = Field(False, description="compile the residual blocks")

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for a length or size that does not divide into latent cells."""
        latent = self.latent
        if (num_frames - 1) % latent.temporal:
            below = (num_frames - 1) // latent.temporal * latent.temporal + 1
            raise UserError(
                f'ae.type = "{self.type}": {num_frames} frames are not {latent.temporal}k+1; choose {below} or '
                f"{below + latent.temporal} as the frames of a bucket or video"
            )
        self.refuse_sides(f'ae.type = "{self.type}"', f"cells of {latent.spatial}", height, width)


class HunyuanVAEConfig(KLSection):
    """HunyuanVideo's causal video autoencoder: 4 x 8 x 8 pixels to a latent cell, the first frame alone."""

    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {"piece_elements"}

    type: Literal["hunyuan_vae"] = Field("hunyuan_vae", description="HunyuanVideo's causal autoencoder")
    from_pretrained: str = Field("hpcai-tech/Open-Sora-v2/hunyuan_vae.safetensors", description=FROM)
    in_channels: Literal[3] = Field(3, description="colours")
    out_channels: Literal[3] = Field(3, description="colours")
    layers_per_block: int = Field(2, ge=1, description="residual blocks per level; the decoder has one more")
    latent_channels: int = Field(16, ge=1, description="channels of a latent cell")
    block_out_channels: tuple[int, int, int, int] = Field((128, 256, 512, 512), description="channels of the levels")
    norm_num_groups: int = Field(32, ge=1, description="groups of the normalisation; divides every level's channels")
    scale_factor: float = Field(0.476986, gt=0, description="latents are multiplied by this, after the shift")
    shift_factor: float = Field(0.0, description="subtracted from the latents first")
    use_spatial_tiling: bool = Field(True, description="frames above sample_size in overlapping tiles")
    use_temporal_tiling: bool = Field(False, description="the same in time, above sample_tsize frames")
    sample_size: Annotated[int, Field(ge=16)] | Literal["auto"] = Field(
        256, description='side of a tile in pixels; `"auto"`: equal tiles of at most 384, which overlap by 64'
    )
    sample_tsize: int = Field(64, ge=8, description="frames of a tile")
    tile_overlap_factor: float = Field(0.25, ge=0, lt=1, description="part of a tile that its neighbour covers too")
    piece_elements: int = Field(
        2**29,
        ge=1,
        le=1 << 50,
        description="elements of one tensor above which samples, and frames in a convolution, run in turn",
    )

    @model_validator(mode="after")
    def _whole_tiles(self) -> HunyuanVAEConfig:
        sides = [] if self.sample_size == "auto" else [("sample_size", 8, self.sample_size)]
        for name, cell, side in (*sides, ("sample_tsize", 4, self.sample_tsize)):
            stride = int(side * (1 - self.tile_overlap_factor))
            if side % cell or stride % cell or not stride:
                raise ValueError(
                    f"ae.{name} = {side}: a tile and its overlap ({self.tile_overlap_factor:g} of it) must be whole "
                    f"latent cells of {cell}; choose a multiple of {4 * cell} with tile_overlap_factor = 0.25"
                )
        return self

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents: 4k+1 frames to k+1."""
        return LatentShape(self.latent_channels, 4, 8, causal=True)


class Autoencoder2DConfig(KLSection):
    """FLUX's image autoencoder: 8 x 8 pixels to a latent cell, every frame by itself."""

    type: Literal["autoencoder_2d"] = Field("autoencoder_2d", description="FLUX's image autoencoder")
    from_pretrained: str = Field("black-forest-labs/FLUX.1-dev/ae.safetensors", description=FROM)
    resolution: int = Field(256, ge=8, description="side of the images it was trained on; decides nothing")
    in_channels: Literal[3] = Field(3, description="colours")
    out_ch: Literal[3] = Field(3, description="colours")
    ch: int = Field(128, ge=1, description="channels of the first level")
    ch_mult: tuple[int, int, int, int] = Field((1, 2, 4, 4), description="channels of the levels, in units of ch")
    num_res_blocks: int = Field(2, ge=1, description="residual blocks per level; the decoder has one more")
    norm_num_groups: int = Field(32, ge=1, description="groups of the normalisation; divides every level's channels")
    z_channels: int = Field(16, ge=1, description="channels of a latent cell")
    scale_factor: float = Field(0.3611, gt=0, description="latents are multiplied by this, after the shift")
    shift_factor: float = Field(0.1159, description="subtracted from the latents first")

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents: a latent frame for each frame."""
        return LatentShape(self.z_channels, 1, 8, causal=True)


class CogVideoXVAEConfig(KLSection):
    """CogVideoX's causal video autoencoder: 4 x 8 x 8 pixels to a latent cell, the first frame alone.

    Keys of `PUBLISHED` that are not written are as the config.json beside the weights says; their defaults are those of
    CogVideoX-2B.
    """

    AUTOENCODER: ClassVar[str] = "longtake.encoders.cogvideox:build"
    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {
        "mini_batch",
        "first_latent_alone",
        "invert_scale_latents",
    }
    PUBLISHED: ClassVar[Mapping[str, str]] = {  # key of a config.json -> ours
        "latent_channels": "latent_channels",
        "block_out_channels": "block_out_channels",
        "layers_per_block": "layers_per_block",
        "norm_num_groups": "norm_num_groups",
        "scaling_factor": "scale_factor",
        "invert_scale_latents": "invert_scale_latents",
    }
    FIXED: ClassVar[Mapping[str, Any]] = {  # what every published config.json says alike
        "act_fn": "silu",
        "in_channels": 3,
        "norm_eps": 1e-6,
        "out_channels": 3,
        "shift_factor": None,
        "temporal_compression_ratio": 4,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }

    type: Literal["cogvideox_vae"] = Field("cogvideox_vae", description="CogVideoX's causal autoencoder")
    from_pretrained: str = Field("THUDM/CogVideoX-2b/vae/diffusion_pytorch_model.safetensors", description=FROM)
    latent_channels: int = Field(16, ge=1, description="channels of a latent cell")
    block_out_channels: tuple[int, int, int, int] = Field((128, 256, 256, 512), description="channels of the levels")
    layers_per_block: int = Field(3, ge=1, description="residual blocks per level; the decoder has one more")
    norm_num_groups: int = Field(32, ge=1, description="groups of the normalisation; divides every level's channels")
    scale_factor: float = Field(1.15258426, gt=0, description="latents are multiplied by this; 0.7 from 5B on")
    shift_factor: ClassVar[float] = 0.0
    invert_scale_latents: bool = Field(
        False, description="known latents are divided by scale_factor instead, as CogVideoX 1.5 has its images"
    )
    encode_frames: int | None = Field(
        None,
        ge=4,
        multiple_of=4,
        description="frames that are encoded together, over which the normalisation takes its means, with a cache of "
        "those before; None: 8, as diffusers has it; TTT-Video trains on latents of 48",
    )
    mini_batch: int = Field(1, ge=1, description="samples encoded or decoded at once")
    first_latent_alone: bool = Field(
        False, description="decode the first latent frame by itself, as VideoX-Fun does, not with those that follow"
    )
    use_tiling: bool = Field(False, description="frames larger than a tile in overlapping tiles")
    tile_height: int = Field(240, ge=1, description="rows of a tile, in pixels")
    tile_width: int = Field(360, ge=1, description="its columns")
    tile_overlap_height: float = Field(1 / 6, ge=0, lt=1, description="part of its rows that the next one has too")
    tile_overlap_width: float = Field(1 / 5, ge=0, lt=1, description="the same of its columns")

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "from_pretrained" not in data or data.keys() >= set(cls.PUBLISHED.values()):
            return data
        place = f"ae.from_pretrained = {data['from_pretrained']!r}"
        facts = published_facts(str(data["from_pretrained"])) or {}
        if (kind := facts.get("_class_name", "AutoencoderKLCogVideoX")) != "AutoencoderKLCogVideoX":
            raise ValueError(f"{place}: holds a {kind}; name the `vae` folder of CogVideoX")
        for key, value in cls.FIXED.items():
            if facts.get(key, value) != value:
                raise ValueError(f"{place}: {key} is {facts[key]!r} there, and only {value!r} is computed here")
        if not {"scaling_factor", "scale_factor"} & {*facts, *data}:
            raise ValueError(
                f"{place}: has no config.json with the scaling_factor, which models differ in; write ae.scale_factor "
                "(1.15258426 of CogVideoX-2B, 0.7 of 5B and 1.5)"
            )
        return {ours: facts[theirs] for theirs, ours in cls.PUBLISHED.items() if theirs in facts} | dict(data)

    @model_validator(mode="after")
    def _whole_tiles(self) -> CogVideoXVAEConfig:
        for name, side, stride in zip(("height", "width"), self.tile_sides, self.tile_strides, strict=True):
            if self.use_tiling and (side % 8 or stride % 8 or not stride):
                raise ValueError(
                    f"ae.tile_{name} = {side}: a tile and its overlap ({side - stride}) must be whole latent cells of "
                    f"8; choose a multiple of 32 with tile_overlap_{name} = 0.25"
                )
        return self

    @property
    def tile_sides(self) -> tuple[int, int]:
        """Rows and columns of a tile, in pixels."""
        return self.tile_height, self.tile_width

    @property
    def tile_strides(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        return int(self.tile_height * (1 - self.tile_overlap_height)), int(
            self.tile_width * (1 - self.tile_overlap_width)
        )

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents: 4k+1 frames to k+1."""
        return LatentShape(self.latent_channels, 4, 8, causal=True)

    @property
    def known_scale(self) -> float:
        """The factor on known latents that an image-to-video model is given."""
        return self.scale_factor**-2 if self.invert_scale_latents else 1.0
