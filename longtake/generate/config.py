"""The config of a generation: what to sample, from which weights, and where to write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from longtake.encoders.autoencoder_config import Autoencoder2DConfig
from longtake.encoders.config import AutoencoderConfig
from longtake.families.registry import family_of
from longtake.models.config import ModelSection
from longtake.system.config import SamplingOption, SystemConfig, unknown_name

if TYPE_CHECKING:
    from longtake.diffusion.known import Window


def own_sampling(data: Mapping[str, Any]) -> SamplingOption:
    return SamplingOption(**family_of(data["model"]).sampling)


def own_kind(data: Mapping[str, Any]) -> str:
    return family_of(data["model"]).kind_of_nothing


class GenerateConfig(SystemConfig):
    """Everything about a generation. The model's part comes from the training run or exported file that is sampled."""

    sampling_option: SamplingOption = Field(default_factory=own_sampling)
    prompt: str | list[str] | None = Field(None, description="one prompt, or a list of them")
    prompts: str | None = Field(
        None,
        description="file of prompts: .txt, one a line, .csv with a column `text` and others, or .json and .jsonl of "
        "storyboards, for models with a text for each segment",
    )
    negative_prompt: str = Field("", description="what guidance moves away from")
    start_index: int = Field(0, ge=0, description="skip this many prompts")
    end_index: int | None = Field(None, ge=1, description="stop before this prompt, counted from 0")
    num_samples: int | None = Field(None, ge=1, description="use at most this many of the remaining prompts")
    num_sample: int = Field(1, ge=1, description="videos for each prompt, at seeds seed, seed + 1, ...")
    cond_type: str = Field(
        default_factory=own_kind,
        description="kind of known frames, one of the model's; they are taken from `ref`, or the column of that name",
    )
    ref: str | list[str] | None = Field(
        None, description="image or video for every prompt without one of its own; a list, or `;` between several"
    )
    mask: str | None = Field(None, description="image or video, for kinds of `cond_type` by pixels: white is made anew")
    companions: dict[str, str] = Field(
        {}, description="files that every video brings along, by the model's names for them; `;` between several stills"
    )
    strength: float = Field(
        1.0, ge=0.0, le=1.0, description="below 1 a video begins from `ref` with this share of noise, not from noise"
    )
    edit_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="known places are made anew from this share of noise on; 0: they are kept"
    )
    num_clips: int = Field(
        1, ge=1, description="clips of a video whose prompt is one row: they make one long video of that prompt"
    )
    carries: str | None = Field(
        None, description="what a further clip of `num_clips` knows of the one before, a kind as for `cond_type`"
    )
    use_t2i2v: bool = Field(False, description="make the first frame with img_flux, an image of each prompt")
    img_flux: SerializeAsAny[ModelSection] | None = Field(None, description="the model that makes these images")
    img_flux_ae: AutoencoderConfig = Autoencoder2DConfig()
    img_resolution: str = Field("768px", description="their resolution; their aspect ratio is the video's")
    batch_size: int = Field(1, ge=1, description="videos sampled at once on each rank")
    offload_model: bool = Field(
        False, description="offload text encoders, denoiser and autoencoder to host memory while they are not in use"
    )
    save_dir: str = Field("samples", description="output folder; nothing in it is overwritten")
    save_prefix: str = Field("", description="prefix of every file name")
    prompt_as_path: bool = Field(False, description="name files by the prompt and `-k`, k from 0")
    prompt_folders: bool = Field(
        False,
        description="write videos to prompt-i/000000.mp4 and prompt.txt, i the number of the prompt, from 0",
    )
    grid: bool = Field(False, description="also write a contact sheet of all videos, grid.png")
    ema: bool = Field(True, description="use the averaged weights (EMA) where the checkpoint has them")

    @property
    def companion_names(self) -> tuple[str, ...]:
        """Names of the auxiliary inputs that the model's family accepts."""
        return tuple(one.name for one in self.sample_rules.companions)

    @property
    def kind(self) -> str:
        """Conditioning kind of videos that have a reference: the frames that are known."""
        return (self.kind_of_first_frame or "") if self.use_t2i2v else self.cond_type

    @property
    def knows_nothing(self) -> bool:
        """True if no video has conditioning frames."""
        return self.kind == self.family.kind_of_nothing

    @property
    def kind_of_first_frame(self) -> str | None:
        """The kind that takes the first frame alone, where the model's family has one."""
        kinds = self._kinds_from_files().items()
        taken = {kind: [frames for window in windows for frames in window.taken] for kind, windows in kinds}
        return next((kind for kind, frames in taken.items() if frames == [range(1)]), None)

    def _kinds_from_files(self) -> dict[str, tuple[Window, ...]]:
        """Return the kinds that take frames of a file, each with those that it takes where a video is long enough."""
        law, long = self.law_of_family, self.ae.latent.pixel_frames(2**16)
        taken = {kind: law.windows(kind, self.ae.latent, long) for kind in self.kinds}
        return {kind: windows for kind, windows in taken.items() if windows}

    def of_stills(self) -> GenerateConfig:
        """Return the generation of the images of `use_t2i2v`. Raises `ValueError` where its parts do not fit."""
        assert self.img_flux is not None, "checked by the schema"
        method = "distill" if "guidance" in self.img_flux.conditions else "i2v"
        option = {"resolution": self.img_resolution, "num_frames": 1, "guidance": self.guidance, "method": method}
        option["guidance_low"] = None
        own = {
            "model": self.img_flux,
            "ae": self.img_flux_ae,
            "sampling_option": self.sampling_option.model_copy(update=option),
            "ae_spatial_compression": None,
            "cond_type": family_of(self.img_flux).kind_of_nothing,
            "motion_score": None,  # a number that a model of images never saw
            "caption_facts": {},
        }
        none = {"use_t2i2v": False, "ref": None, "lora": None, "low_noise": None, "freeze": (), "train_only": None}
        none |= {"companions": {}, "mask": None, "strength": 1.0, "edit_ratio": 0.0, "num_clips": 1, "carries": None}
        try:
            return GenerateConfig.model_validate({**dict(self), **own, **none})
        except ValidationError as error:
            fault = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"img_flux: {fault} (its model and ae are img_flux and img_flux_ae)") from None

    @model_validator(mode="after")
    def _parts_can_be_made(self) -> GenerateConfig:
        if self.sampling_option.method == "distill" and "guidance" not in self.model.conditions:
            raise ValueError(
                'sampling_option.method = "distill": this model takes no guidance scale as a condition; write "i2v"'
            )
        if fault := unknown_name("companions", self.companions, self.companion_names):
            raise ValueError(fault)
        if self.use_t2i2v:
            self._check_stills()
        self._check_clips()
        self._check_known()
        return self

    def _check_stills(self) -> None:
        if self.img_flux is None:
            raise ValueError("use_t2i2v = True: there is no img_flux, the model of the images; take a t2i2v preset")
        if (first := self.kind_of_first_frame) is None:
            raise ValueError("use_t2i2v = True: this model takes no first frame; leave it out")
        if self.cond_type not in (self.family.kind_of_nothing, first):
            raise ValueError(f'cond_type = "{self.cond_type}": use_t2i2v makes the first frame; write "{first}"')
        self.of_stills()

    def _check_clips(self) -> None:
        if self.num_clips == 1 and self.carries is not None:
            raise ValueError(f'carries = "{self.carries}": there is one clip; write num_clips = 2 or more')
        if self.num_clips > 1 and self.carries is None:
            taken = {} if self.model.refuses_known else self._kinds_from_files()
            kinds = ", ".join(kind for kind in taken if kind not in self.law_of_family.needs_mask)
            fix = f"write carries = one of {kinds}" if kinds else "this model can go on from no clip, so write 1"
            raise ValueError(f"num_clips = {self.num_clips}: {fix}")
        if self.num_clips > 1 and self.companions:
            raise ValueError(
                f"num_clips = {self.num_clips}: companions are files of one clip; give --prompts a .csv with a row for "
                "each clip"
            )

    def _check_known(self) -> None:
        key = "use_t2i2v = True" if self.use_t2i2v else f'cond_type = "{self.cond_type}"'
        kinds, of_ref = self.kinds, f"ref = {self.ref!r}"
        unused = self.ref is not None and self.strength == 1
        if not kinds and (self.kind or unused):
            place = key if self.kind else of_ref
            raise ValueError(f"{place}: this model takes no conditioning frames; leave it out")
        if kinds and not self.family.has_kind(self.kind, self.model):
            raise ValueError(f"{key}: choose one of {', '.join(kinds)}")
        if (refusal := self.model.refuses_known) and (unused or not self.knows_nothing):
            train = "in the run that trains it, with a condition_config (docs/generate.md: From an image on, by a model"
            raise ValueError(f"{of_ref if self.knows_nothing else key}: {refusal} {train} of your own)")
        if self.knows_nothing:
            if unused:
                fix = next((f'write cond_type = "{kind}"' for kind in self._kinds_from_files()), "leave it out")
                raise ValueError(f"{of_ref}: {key} knows no frames; {fix}")
            return
        if fault := self.fault_of_kind(self.kind):
            raise ValueError(f"{key}: {fault}; ask for more")

    def fault_of_kind(self, kind: str) -> str | None:
        """Why a kind of the model's takes nothing of a reference, as a clause."""
        frames, latent, law = self.sampling_option.num_frames, self.ae.latent, self.law_of_family
        if law.windows(kind, latent, frames):
            return None
        if kind in self.kinds or latent(frames, 1, 1)[1] == 1:
            return f"sampling_option.num_frames = {frames} leaves no frame to be made"
        later = range(1, self.num_clips)  # one that is written out may be about these alone
        if any(law.continued(kind, self.carries, clip) != self.carries for clip in later):
            return None
        return f"is about no clip, counted from 0, that there is in num_clips = {self.num_clips}"
