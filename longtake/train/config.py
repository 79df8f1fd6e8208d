"""The config of a training run. Open-Sora 2.0's keys are the native names; each section belongs to its package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeFloat, SerializeAsAny, ValidationInfo, field_validator, model_validator

from longtake.buckets.assignment import BucketRule
from longtake.buckets.entries import bucket_config_faults
from longtake.buckets.protocol import BucketLaw
from longtake.buckets.section import SizesSection
from longtake.data.config import DatasetConfig, DatasetWithoutTable
from longtake.evaluate.config import ValidationConfig
from longtake.families.registry import family_of, family_of_tree
from longtake.system.config import SystemConfig, unknown_name
from longtake.track.config import TrackingConfig
from longtake.train.optimizer.config import OptimizerConfig

NUMBER = "{n}"  # in `exp_name`: the next free number of the folders in `outputs`
_MOST_STEPS = 10**12


class RunConfig(SystemConfig, TrackingConfig):
    """Everything a training run is, in one typed tree."""

    dataset: DatasetConfig
    sizes: SerializeAsAny[SizesSection] | None = Field(
        None, description="options of the bucket law of the model's family, in place of bucket_config"
    )
    bucket_config: dict[str, dict[int, Any]] = Field(
        {}, description="resolution -> frames -> (keep, batch size); see data.md"
    )
    dropout_ratio: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        {},
        description="share of the samples whose text is replaced by that of no text, for classifier-free guidance; by "
        "the section of the text encoder, each on its own",
    )

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr",
        "batch_size": "bucket_config, whose entries hold the sizes of batches",
        "train_batch_size": "bucket_config, whose entries hold the sizes of batches",
        "resolution": "bucket_config, whose keys are the resolutions",
        "num_frames": "bucket_config, whose keys are numbers of frames",
        "steps": "max_steps",
        "num_steps": "max_steps",
        "train_steps": "max_steps",
        "max_train_steps": "max_steps",
        "num_epochs": "epochs",
        "num_train_epochs": "epochs",
        "gradient_accumulation_steps": "accumulation_steps",
        "grad_accum_steps": "accumulation_steps",
        "gradient_checkpointing": "model.grad_ckpt_settings",
        "max_grad_norm": "grad_clip",
        "mixed_precision": "dtype",
        "lr_warmup_steps": "warmup_steps",
        "checkpointing_steps": "ckpt_every",
        "save_steps": "ckpt_every",
        "save_every": "ckpt_every",
        "validation_steps": "validate_every",
        "eval_every": "validate_every",
        "validation_epochs": "validate_every_passes",
        "validation_prompts": "validation.prompts",
        "validation_paths": "validation.references",
        "logging_steps": "log_every",
        "resume_from_checkpoint": "resume",
        "output_dir": "outputs",
        "output": "outputs",
        "name": "exp_name",
        "run_name": "exp_name",
        "data": "dataset.data_path",
        "data_dir": "dataset.data_path",
        "dataset_path": "dataset.data_path",
        "use_ema": "ema_decay",
        "dataloader_num_workers": "num_workers",
        "lora_rank": "lora.rank",
        "pretrained": "model.from_pretrained",
        "pretrained_model_name_or_path": "model.from_pretrained",
    }

    condition_config: dict[str, NonNegativeFloat] | None = Field(
        None,
        description="weights, on any scale, of the kinds of conditioning frames to train on, by the model's family "
        "(see generate.md); a clip too short for a kind uses another; None: text alone",
    )
    no_i2v_ref_loss: bool = Field(False, description="conditioning frames are left out of the loss")

    optim: OptimizerConfig = OptimizerConfig()
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    eps: float = Field(1e-15, gt=0, description="epsilon of AdamW")
    warmup_steps: int | None = Field(None, ge=0, le=_MOST_STEPS, description="steps of linear warm-up; None or 0: none")
    initial_lr: float = Field(1e-6, ge=0, description="where the warm-up begins")
    use_cosine_scheduler: bool = Field(False, description="cosine from the end of the warm-up to 0 at the last step")
    decay_fraction: float = Field(
        0.0, ge=0, le=1, description="share of the run over which lr falls linearly at the end"
    )
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="what is left of lr at the end of that fall")
    grad_clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    accumulation_steps: int = Field(
        1, ge=1, le=1 << 16, description="micro-batches of each rank in one step, at first launch"
    )
    slots_per_step: int | None = Field(
        None,
        ge=1,
        le=1 << 16,
        description="slots in one step (G): micro-batches, or as many as parallel.bucket_sequence runs side by side; "
        "default: data ranks x accumulation_steps at first launch",
    )
    ema_decay: float | None = Field(None, gt=0, lt=1, description="decay of the EMA of the weights; None: no EMA")
    ema_offload: bool = Field(False, description="the EMA lives in the host's memory")

    epochs: int = Field(1000, ge=1, le=_MOST_STEPS, description="passes through the data")
    max_steps: int | None = Field(None, ge=1, le=_MOST_STEPS, description="stop at this many optimizer steps")
    time_limit: float | None = Field(
        None,
        gt=0,
        description="minutes that a launch may take, as the scheduler of a cluster limits them: it stops with a "
        "checkpoint 6 minutes before, or after nine tenths of them where that is later",
    )
    num_workers: int = Field(4, ge=0, le=1024, description="loader processes of each rank; 0: in process")
    prefetch_factor: int = Field(2, ge=1, le=1024, description="batches that each loader process makes ahead")
    gc_every: int = Field(
        50, ge=0, description="steps between runs of Python's garbage collector, together on all ranks; 0: Python's own"
    )

    stage_number: int = Field(0, ge=0, description="number of the stage in its curriculum; part of every random key")

    outputs: str = Field("outputs", description="folder of run folders")
    exp_name: str | None = Field(
        None,
        description="the run's folder name, where {n} is the next free number of outputs, as in 007; default: date, "
        "time and config name",
    )
    log_every: int = Field(10, ge=1, description="steps between lines on the terminal and tracker points")
    ckpt_every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end and on Ctrl-C")
    keep_n_latest: int = Field(-1, description="complete checkpoints kept; -1: all")
    keep_every: int | None = Field(None, ge=1, description="checkpoints of steps divisible by this are kept as well")
    validate_every: int = Field(
        0, ge=0, description="steps between validations, one before the first step among them; 0: none by steps"
    )
    validate_every_passes: int = Field(
        0, ge=0, description="passes between validations, made at a pass's end, the first pass's among them; 0: none"
    )
    validation: ValidationConfig | None = Field(None, description="what the run shows and measures of itself")
    async_io: bool = Field(True, description="write checkpoints beside the run, which waits for a copy only")
    lora_files: dict[str, str] = Field(
        {},
        description="files beside the run's folder that each checkpoint's adapters are written to as well: style -> "
        "name with {step} in it, as in dict(peft='checkpoint-{step}'); they go when their checkpoint goes",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="bf16 peak of one device, 10^12 FLOP/s, that MFU is counted by; None: by its name"
    )
    first_step_timeout: float = Field(1800.0, gt=0, description="seconds until a run that makes no first step gives up")
    watchdog_seconds: float | None = Field(
        1800.0, gt=0, description="seconds without a step until a run reports where it hangs and ends; None: never"
    )
    skip_grad_norm: float | None = Field(
        None, gt=0, description="a step with a larger gradient norm is left out; one that is not finite always is"
    )
    max_skipped: int = Field(5, ge=0, description="steps in a row that may be left out before the run ends")

    load: str | None = Field(None, description="checkpoint to start from: a folder, a glob, a run folder, or `latest`")
    resume: str | None = Field(None, description="`auto`: continue the newest checkpoint of the run of the same name")
    start_epoch: int | None = Field(None, ge=0, le=_MOST_STEPS, description="restart the data at this pass")
    start_step: int | None = Field(None, ge=0, le=_MOST_STEPS, description="restart the data at this step of the pass")

    @classmethod
    def beneath(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        below = super().beneath(written)
        for name, keys in family_of_tree(below).in_training.items():
            if name in below:
                below[name] = {**below[name], **keys}
        return below

    def slots_at(self, data_ranks: int) -> int:
        """Slots in one step of a run that is first launched on so many data ranks."""
        return self.slots_per_step or data_ranks * self.accumulation_steps

    @property
    def bucket_rule(self) -> BucketLaw:
        """Rule that assigns each clip its bucket: by `sizes`, the family's own rule, or `bucket_config`. Raises
        `UserError`."""
        if self.sizes is not None:
            return self.sizes.law(self)
        if self.family.bucket_rule is not None:
            return self.family.bucket_rule(self)
        ceiling, stride = self.dataset.fps_max, self.sample_rules.stride
        return BucketRule.from_config(self.bucket_config, self.size_divisor, ceiling, self.bucket_law, stride)

    @field_validator("sizes", mode="before")
    @classmethod
    def _of_the_family(cls, value: Any, info: ValidationInfo) -> Any:
        own = family_of(info.data["model"]).sizes if "model" in info.data else None
        if own is None and isinstance(value, Mapping) and "type" not in value:
            raise ValueError("this model has no bucket law of its own; give a bucket_config in its place")
        return {"type": own.model_fields["type"].default, **value} if own and isinstance(value, Mapping) else value

    @field_validator("sizes")
    @classmethod
    def _is_that_of_the_family(cls, value: SizesSection | None, info: ValidationInfo) -> SizesSection | None:
        own = family_of(info.data["model"]).sizes if "model" in info.data else None
        if value is not None and "model" in info.data and not (own and isinstance(value, own)):
            fix = f'write type = "{own.model_fields["type"].default}"' if own else "give a bucket_config in its place"
            raise ValueError(f'"{value.type}" is a bucket law of other models than this one; {fix}')
        return value

    @field_validator("bucket_config")
    @classmethod
    def _buckets_are_well_formed(
        cls, value: dict[str, dict[int, Any]], info: ValidationInfo
    ) -> dict[str, dict[int, Any]]:
        if "sizes" not in info.data:  # its own validator reports it
            return value
        if info.data["sizes"] is not None:
            if value:
                raise ValueError("sizes says the buckets already; leave one of the two out, or write --sizes None")
            return value
        try:
            family = family_of(info.data["model"])
            law = family.bucket_law(family.quirks_of(info.data["compat"]))
        except (KeyError, ValueError):  # their own validators report them
            return value
        if family.bucket_rule is None and (faults := bucket_config_faults(value, law=law)):
            raise ValueError("; ".join(faults))
        return value

    @field_validator("validation", mode="before")
    @classmethod
    def _samples_as_the_run(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping) or "sampling_option" not in info.data:
            return value
        own, given = info.data["sampling_option"].model_dump(), value.get("sampling_option", {})
        return {**value, "sampling_option": {**own, **given}} if isinstance(given, Mapping) else value

    @field_validator("exp_name")
    @classmethod
    def _name_is_plain(cls, value: str | None) -> str | None:
        if value is not None and (not value or "/" in value or value.startswith(".")):
            raise ValueError(f"exp_name = {value!r}: must be a plain folder name; the place goes into outputs")
        return value

    @field_validator("keep_n_latest")
    @classmethod
    def _something_is_kept(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be -1 to keep all checkpoints, or at least 1")
        return value

    @field_validator("resume")
    @classmethod
    def _resume_is_auto(cls, value: str | None) -> str | None:
        if value not in (None, "auto"):
            raise ValueError('must be "auto" or None; to start from one checkpoint write --load FOLDER')
        return value

    @model_validator(mode="after")
    def _degrees_are_of_entries(self) -> RunConfig:
        degrees = self.parallel.bucket_sequence
        if not isinstance(degrees, dict):
            return self
        table, entries = ("bucket_config" if self.sizes is None else "sizes"), self._entries
        for resolution, lengths in degrees.items():
            place = f"parallel.bucket_sequence.{resolution}"
            if resolution not in entries:
                raise ValueError(f"{place}: no resolution of {table}; choose one of {', '.join(entries)}")
            for num_frames in lengths:
                if num_frames not in (known := entries[resolution]):
                    raise ValueError(
                        f"{place}.{num_frames}: no length of {table}.{resolution}; "
                        f"choose one of {', '.join(map(str, known))}"
                    )
        return self

    @property
    def _entries(self) -> dict[str, list[int]]:
        """The lengths of each resolution that clips are sorted into."""
        if self.sizes is None:
            return {name: list(lengths) for name, lengths in self.bucket_config.items()}
        found: dict[str, list[int]] = {}
        for name, num_frames in sorted(self.bucket_rule.entries):
            found.setdefault(name, []).append(num_frames)
        return found

    @model_validator(mode="after")
    def _conditions_have_an_entrance(self) -> RunConfig:
        if self.condition_config is not None:
            if self.family.known is None:
                raise ValueError("condition_config: this model takes no conditioning frames; leave it out")
            if refusal := self.model.refuses_known:
                raise ValueError(f"condition_config: {refusal} or leave condition_config out")
            if fault := unknown_name("condition_config", self.condition_config, self.kinds):
                raise ValueError(fault)
            if not any(self.condition_config.values()):
                first = f"{self.family.kind_of_nothing} = 1"
                raise ValueError(f"condition_config: every weight is 0; give one kind a weight, such as {first}")
        if self.no_i2v_ref_loss and self.condition_config is None:
            raise ValueError("no_i2v_ref_loss = True: no conditioning frames; name kinds in condition_config")
        return self

    @property
    def text_dropout(self) -> dict[str, float]:
        """`dropout_ratio` by the conditions that the text encoders make."""
        return {text.condition: self.dropout_ratio.get(text.section, 0.0) for text in self.family.texts}

    @model_validator(mode="after")
    def _keys_go_together(self) -> RunConfig:
        if fault := unknown_name("dropout_ratio", self.dropout_ratio, [text.section for text in self.family.texts]):
            raise ValueError(fault)
        every = next((key for key in ("validate_every", "validate_every_passes") if getattr(self, key)), None)
        if every and self.validation is None:
            raise ValueError(f'{every}: there is nothing to make; write validation = dict(prompts=["a red circle"])')
        if self.validation is not None and every is None:
            raise ValueError("validation: is never made; write validate_every = N steps, or leave it out")
        if self.lora is not None and self.lora.strength != 1:
            raise ValueError(f"lora.strength = {self.lora.strength}: is for generation; training wants 1")
        if self.lora is not None and self.lora.more:
            raise ValueError("lora.more: is for generation; training starts from one file, lora.from_pretrained")
        if self.optim.clip is not None and not self.grad_clip:
            raise ValueError("optim.clip: grad_clip is 0, so nothing is clipped; write grad_clip = 1.0")
        if self.lora_files:
            self._check_lora_files()
        if self.ema_offload and self.ema_decay is None:
            raise ValueError("ema_offload = True: there is no EMA; write ema_decay = 0.99, or leave ema_offload out")
        if self.use_cosine_scheduler and self.decay_fraction:
            raise ValueError(
                f"decay_fraction = {self.decay_fraction}: use_cosine_scheduler already lowers lr; keep one of the two"
            )
        if (self.use_cosine_scheduler or self.decay_fraction) and self.max_steps is None:
            raise ValueError("max_steps = None: a schedule that decays must know its last step; write max_steps = N")
        own = self.optim.lr, self.warmup_steps, self.use_cosine_scheduler, self.decay_fraction
        if self.optim.schedule is not None and any(own):
            raise ValueError(
                "optim.schedule: says the rates by itself; leave optim.lr, warmup_steps, use_cosine_scheduler and "
                "decay_fraction out"
            )
        if self.low_noise is not None:
            self._check_low_noise(self.low_noise.boundary)
        if self.load and self.resume:
            raise ValueError(f"load = {self.load!r}: resume already names the checkpoint; keep one of the two")
        return self

    def _check_low_noise(self, boundary: float) -> None:
        """Raise `ValueError` where two denoisers cannot be trained in one run."""
        if self.objective.within(0.0, 1.0) is None:
            raise ValueError(
                f'low_noise: objective.type = "{self.objective.type}" has no law of times that can be cut; train '
                "one denoiser (low_noise = None)"
            )
        if self.objective.within(boundary, 1.0) is None or self.objective.within(0.0, boundary) is None:
            raise ValueError(
                f"low_noise.boundary = {boundary:g}: objective.time_range has no times on one side of it; expected a "
                "range around the boundary, or one denoiser (low_noise = None)"
            )
        if self.lora_files:
            raise ValueError(
                "lora_files: are for one denoiser, and low_noise is a second one; export each by `longtake checkpoint "
                "export`"
            )

    def _check_lora_files(self) -> None:
        if self.lora is None:
            raise ValueError("lora_files: nothing trains adapters; add a lora section, or leave lora_files out")
        styles = self.family.weight_format.lora_styles
        if fault := unknown_name("lora_files", self.lora_files, styles):
            raise ValueError(fault)
        for style, name in self.lora_files.items():
            if "{step}" not in name or "/" in name or name.endswith(".safetensors") == (styles[style].config == "file"):
                plain = "{step}" if styles[style].config == "file" else "{step}.safetensors"
                raise ValueError(f"lora_files.{style} = {name!r}: write a plain name such as 'checkpoint-{plain}'")


class RunWithoutTable(RunConfig):
    """A run for `plan` and `config show`, which need no clips: a preset does not name any."""

    dataset: DatasetWithoutTable = DatasetWithoutTable()
