"""The `ae` section of Wan's two autoencoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from longtake.contracts import LatentShape
from longtake.encoders.autoencoder_config import FROM, EncoderSection, KLSection
from longtake.hub import published_facts

Version = Literal["2.1", "2.2"]
_CLASS = "AutoencoderKLWan"
# fmt: off
_MEAN_21 = (-.7571, -.7089, -.9113, .1075, -.1745, .9653, -.1517, 1.5508, .4134, -.0715, .5517, -.3632, -.1922, -.9497,
            .2503, -.2921)
_STD_21 = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
           1.1253, 2.8251, 1.9160)
_MEAN_22 = (-.2289, -.0052, -.1323, -.2339, -.2799, .0174, .1838, .1557, -.1382, .0542, .2813, .0891, .1570, -.0098,
            .0375, -.1825, -.2246, -.1207, -.0698, .5109, .2665, -.2108, -.2158, .2502, -.2055, -.0322, .1109, .1567,
            -.0729, .0899, -.2799, -.1230, -.0313, -.1649, .0117, .0723, -.2839, -.2083, -.0520, .3748, .0152, .1957,
            .1433, -.2944, .3573, -.0548, -.1681, -.0667)
_STD_22 = (.4765, 1.0364, .4514, 1.1677, .5313, .4990, .4818, .5013, .8158, 1.0344, .5894, 1.0901, .6885, .6165, .8454,
           .4978, .5759, .3523, .7135, .6804, .5833, 1.4146, .8986, .5659, .7069, .5338, .4889, .4917, .4069, .4999,
           .6866, .4093, .5709, .6065, .6415, .4944, .5726, 1.2042, .5458, 1.6887, .3971, 1.0600, .3943, .5537, .5444,
           .4089, .7468, .7744)
# fmt: on
_SIZES: dict[str, dict[str, Any]] = {  # of the published weights of each version
    "2.1": {
        "from_pretrained": "Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth",
        "base_dim": 96,
        "latent_channels": 16,
        "latents_mean": _MEAN_21,
        "latents_std": _STD_21,
    },
    "2.2": {
        "from_pretrained": "Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth",
        "base_dim": 160,
        "decoder_base_dim": 256,
        "latent_channels": 48,
        "latents_mean": _MEAN_22,
        "latents_std": _STD_22,
    },
}
_VERSION_OF_FILE = {
    "wan2.1_vae": "2.1",
    "wan_2.1_vae": "2.1",
    "wan2.2_vae": "2.2",
    "wan_2.2_vae": "2.2",
}  # as published
_FIXED: dict[str, Any] = {  # the same in every published config.json
    "attn_scales": [],
    "dropout": 0.0,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
}
_FIXED_OF_VERSION: dict[str, dict[str, Any]] = {
    "2.1": {"in_channels": 3, "out_channels": 3, "patch_size": None, "scale_factor_spatial": 8},
    "2.2": {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
}


class WanVAEConfig(KLSection):
    """Wan's causal video autoencoders: 4 x 8 x 8 pixels to a latent cell of 16 channels (2.1), or 4 x 16 x 16 to one of
    48 (2.2); the first frame alone.

    Keys that are not written are taken from the config.json of a diffusers folder, or from the published sizes of the
    version.
    """

    AUTOENCODER: ClassVar[str] = "longtake.encoders.wan:build"
    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {"mini_batch"}
    PUBLISHED: ClassVar[Mapping[str, str]] = {  # key of a config.json -> ours
        "base_dim": "base_dim",
        "decoder_base_dim": "decoder_base_dim",
        "z_dim": "latent_channels",
        "dim_mult": "dim_mult",
        "num_res_blocks": "num_res_blocks",
        "latents_mean": "latents_mean",
        "latents_std": "latents_std",
    }

    type: Literal["wan"] = Field("wan", description="Wan's causal autoencoders")
    version: Version = Field(
        "2.1",
        description="`2.1`: of Wan 2.1 and of A14B of 2.2; `2.2`: of TI2V-5B; by default as the file's name or the "
        "config.json says",
    )
    from_pretrained: str = Field("Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth", description=FROM + ", also `.pth`")
    latent_channels: int = Field(16, ge=1, description="channels of a latent cell; 48 in 2.2")
    base_dim: int = Field(96, ge=1, description="channels of the encoder's first level; 160 in 2.2")
    decoder_base_dim: int | None = Field(
        None, ge=1, description="channels of the decoder's last level; None: base_dim; 256 in 2.2"
    )
    dim_mult: tuple[int, int, int, int] = Field(
        (1, 2, 4, 4), description="channels of the levels, in units of base_dim"
    )
    num_res_blocks: int = Field(2, ge=1, description="residual blocks per level; the decoder has one more")
    latents_mean: tuple[float, ...] = Field(_MEAN_21, description="subtracted from each channel of the latents first")
    latents_std: tuple[float, ...] = Field(_STD_21, description="each channel of the latents is divided by this then")
    posterior: Literal["sample", "mode"] = Field(
        "mode", description="`mode` takes the posterior's mean, as Wan's own code; `sample` draws from it"
    )
    compile: bool = Field(False, description="compile the norms")
    mini_batch: int = Field(1, ge=1, description="samples encoded or decoded at once")
    use_tiling: bool = Field(
        False, description="frames larger than a tile in overlapping tiles, as diffusers cuts them"
    )
    tile_height: int = Field(
        256, ge=1, description="rows of a tile, in pixels; 2.2 encodes in tiles of twice as many, as diffusers does"
    )
    tile_width: int = Field(256, ge=1, description="its columns")
    tile_overlap_height: float = Field(1 / 4, ge=0, lt=1, description="part of its rows that the next one has too")
    tile_overlap_width: float = Field(1 / 4, ge=0, lt=1, description="the same of its columns")

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("version"), float):  # written without quotes
            data = {**data, "version": str(data["version"])}
        if not isinstance(data, Mapping) or data.keys() >= {*cls.PUBLISHED.values(), "version", "from_pretrained"}:
            return data
        facts = _facts(str(data["from_pretrained"])) if "from_pretrained" in data else None
        if facts is None:
            stem = PurePath(str(data.get("from_pretrained", ""))).stem.lower()
            version = str(data.get("version", _VERSION_OF_FILE.get(stem, "2.1")))
            return {"version": version} | _SIZES.get(version, {}) | dict(data)
        place = f"ae.from_pretrained = {data['from_pretrained']!r}"
        version = "2.2" if facts.get("is_residual") else "2.1"
        if (written := data.get("version", version)) != version:
            raise ValueError(
                f"{place}: holds the autoencoder of Wan {version}, expected {written}; leave ae.version out"
            )
        for key, value in (_FIXED | _FIXED_OF_VERSION[version]).items():
            if facts.get(key, value) != value:
                raise ValueError(f"{place}: {key} is {facts[key]!r} there, and only {value!r} is supported")
        sizes = {ours: facts[theirs] for theirs, ours in cls.PUBLISHED.items() if theirs in facts}
        return {"version": version} | _SIZES[version] | sizes | dict(data)

    @model_validator(mode="after")
    def _channels_agree(self) -> WanVAEConfig:
        for name in ("latents_mean", "latents_std"):
            if (count := len(getattr(self, name))) != self.latent_channels:
                raise ValueError(
                    f"ae.{name}: has {count} numbers, expected one for each of {self.latent_channels} channels "
                    "(ae.latent_channels)"
                )
        if min(self.latents_std) <= 0:
            raise ValueError(f"ae.latents_std: has {min(self.latents_std):g}, expected numbers above 0")
        return self

    @model_validator(mode="after")
    def _whole_tiles(self) -> WanVAEConfig:
        cell = self.latent.spatial
        for name, side, stride in zip(("height", "width"), self.tile_sides, self.tile_strides, strict=True):
            if self.use_tiling and (side % cell or stride % cell or not stride):
                raise ValueError(
                    f"ae.tile_{name} = {side}: a tile and its overlap ({side - stride}) must be whole latent cells of "
                    f"{cell}; choose a multiple of {4 * cell} with tile_overlap_{name} = 0.25"
                )
        return self

    @property
    def fold(self) -> int:
        """Side of the squares of pixels that are channels of the network."""
        return 2 if self.version == "2.2" else 1

    @property
    def tile_sides(self) -> tuple[int, int]:
        """Rows and columns of a tile, in pixels."""
        return self.tile_height, self.tile_width

    @property
    def tile_strides(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        overlaps = self.tile_overlap_height, self.tile_overlap_width
        height, width = (round(side * (1 - overlap)) for side, overlap in zip(self.tile_sides, overlaps, strict=True))
        return height, width

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents: 4k+1 frames to k+1."""
        return LatentShape(self.latent_channels, 4, 8 * self.fold, causal=True)


def _facts(name: str) -> dict[str, Any] | None:
    """Return the config.json of a diffusers folder, or alongside a file of one; None of an official file, whose
    neighbour of that name describes the denoiser."""
    facts = published_facts(name)
    if facts is None or (kind := facts.get("_class_name", _CLASS)) == _CLASS:
        return facts
    if PurePath(name).suffix:
        return None
    raise ValueError(
        f"ae.from_pretrained = {name!r}: holds a {kind}; name the `vae` folder of Wan in diffusers' layout, or "
        "Wan2.1_VAE.pth or Wan2.2_VAE.pth"
    )
