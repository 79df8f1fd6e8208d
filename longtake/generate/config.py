"""The config of a generation: what to sample, from which weights, and where to."""

from __future__ import annotations

from pydantic import Field, ValidationError, model_validator

from longtake.diffusion import Kind, known_windows
from longtake.encoders import Autoencoder2DConfig, AutoencoderConfig
from longtake.models import MMDiTConfig
from longtake.system import SamplingOption, SystemConfig


class GenerateConfig(SystemConfig):
    """Everything a generation is. The model's own part comes from the training run or exported file it is made from."""

    sampling_option: SamplingOption = SamplingOption()
    prompt: str | list[str] | None = Field(None, description="one prompt, or a list of them")
    prompts: str | None = Field(
        None, description="file of prompts: .txt, one a line, or .csv with columns `text`, `ref`, `neg`, `name`"
    )
    negative_prompt: str = Field("", description="what guidance moves away from")
    start_index: int = Field(0, ge=0, description="leave out so many of the prompts")
    end_index: int | None = Field(None, ge=1, description="and those from this one on, counted from 0")
    num_samples: int | None = Field(None, ge=1, description="use only this many of the prompts that are left")
    num_sample: int = Field(1, ge=1, description="videos for each prompt, at seeds seed, seed + 1, ...")
    cond_type: Kind = Field("t2v", description="which frames are known: taken from `ref`, or the column of that name")
    ref: str | None = Field(
        None, description="image or video for every prompt without one of its own; several with `;` between them"
    )
    use_t2i2v: bool = Field(False, description="make an image of each prompt with img_flux first, then i2v_head")
    img_flux: MMDiTConfig | None = Field(None, description="the model that makes these images")
    img_flux_ae: AutoencoderConfig = Autoencoder2DConfig()
    img_resolution: str = Field("768px", description="their resolution; their aspect ratio is the video's")
    batch_size: int = Field(1, ge=1, description="videos sampled at once on each rank")
    offload_model: bool = Field(
        False, description="text encoders, denoiser and autoencoder are on the GPU only while they work"
    )
    save_dir: str = Field("samples", description="folder that videos go into; nothing in it is overwritten")
    save_prefix: str = Field("", description="begins the name of every file")
    prompt_as_path: bool = Field(False, description="name files by the prompt and `-k`, k from 0")
    grid: bool = Field(False, description="also write a contact sheet of all videos, grid.png")
    ema: bool = Field(True, description="use the averaged weights where the checkpoint has them")

    @property
    def kind(self) -> Kind:
        """Which frames are known of videos that have a reference."""
        return "i2v_head" if self.use_t2i2v else self.cond_type

    def of_stills(self) -> GenerateConfig:
        """The generation of the images of `use_t2i2v`. Raises `ValueError` where its parts do not fit."""
        assert self.img_flux is not None, "checked by the schema"
        option = self.sampling_option.model_copy(
            update={
                "resolution": self.img_resolution,
                "num_frames": 1,
                "guidance": self.guidance,
                "method": "distill" if self.img_flux.guidance_embed else "i2v",
            }
        )
        own = {
            "model": self.img_flux,
            "ae": self.img_flux_ae,
            "sampling_option": option,
            "ae_spatial_compression": None,
        }
        training = {"lora": None, "freeze": (), "train_only": None}
        request = {"use_t2i2v": False, "cond_type": "t2v", "ref": None, "motion_score": None}  # which it never saw
        try:
            return GenerateConfig.model_validate({**dict(self), **own, **training, **request})
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"img_flux: {said} (its model and ae are img_flux and img_flux_ae)") from None

    @model_validator(mode="after")
    def _method_fits(self) -> GenerateConfig:
        if self.sampling_option.method == "distill" and not self.model.guidance_embed:
            raise ValueError(
                'sampling_option.method = "distill": model.guidance_embed is False, so the model cannot be told a '
                'scale; write "i2v"'
            )
        return self

    @model_validator(mode="after")
    def _stills_can_be_made(self) -> GenerateConfig:
        if not self.use_t2i2v:
            return self
        if self.img_flux is None:
            raise ValueError("use_t2i2v = True: there is no img_flux, the model of the images; take a t2i2v preset")
        if self.cond_type not in ("t2v", "i2v_head"):
            raise ValueError(f'cond_type = "{self.cond_type}": use_t2i2v makes the first frame; write "i2v_head"')
        self.of_stills()
        return self

    @model_validator(mode="after")
    def _frames_can_be_known(self) -> GenerateConfig:
        key = "use_t2i2v = True" if self.use_t2i2v else f'cond_type = "{self.cond_type}"'
        if self.kind == "t2v":
            if self.ref is not None:
                raise ValueError(f'ref = {self.ref!r}: cond_type = "t2v" knows no frames; write cond_type = "i2v_head"')
            return self
        if not self.model.cond_embed:
            raise ValueError(f"{key}: model.cond_embed is False, so this model cannot be given frames")
        frames = self.sampling_option.num_frames
        if not known_windows(self.kind, self.ae.latent, frames):
            raise ValueError(f"{key}: sampling_option.num_frames = {frames} leaves no frame to be made; ask for more")
        return self
