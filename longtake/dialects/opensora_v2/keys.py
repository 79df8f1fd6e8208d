"""The keys of Open-Sora 2.0's run files and flags."""

from __future__ import annotations

from longtake.dialects.table import KeyRow

_BUFFERS = "gradients are reduced block by block, during the backward pass"
_TIMES = "the log has times of steps and of the loader in every line"
_MASTERS = "checkpoints hold the master weights, and loading takes them"
_STORE = "make a latent store with `longtake data encode RUN -o FOLDER` and give it as dataset.latents"
_NO_NSYS = "not needed without nsys"
_ADAMW = "AdamW is the optimizer"
_TILES = "the ranks of `parallel` share its tiles; ae.placement bounds its memory"
_UNPAID = "Longtake sends nothing to paid services; write the final prompt"
_CAUSAL = "the autoencoder has it in its own config"
_SETTINGS = "model.grad_ckpt_settings"
_NO_PIPELINE = "there is no pipeline parallelism; sp_size or zero_stage 3 spread the memory of blocks"
_GUIDE_IN_FILES = (
    "`sampling_option.*`, in files and as flags; `--guidance` too. `guidance` in a file is an input of FLUX"
)

PLUGIN = (
    KeyRow(
        "plugin",
        docs="`zero1`, `zero2`: `parallel.zero = 2`; `hybrid`: as `plugin_config.zero_stage`; others are refused",
    ),
    KeyRow("plugin_config.zero_stage", docs="`parallel.zero`: 2, or 3"),
    KeyRow("plugin_config.tp_size", docs="`parallel.tensor`. In inference cut to what the number of processes allows"),
    KeyRow(
        "plugin_config.sp_size", docs="`parallel.sequence`. In inference cut to what the number of processes allows"
    ),
    KeyRow("plugin_config.enable_sequence_parallelism", docs="False: `sp_size` counts as 1"),
    KeyRow("plugin_config.pp_size", only=(1, None), reason=_NO_PIPELINE),
    KeyRow(
        "plugin_config.sequence_parallelism_mode",
        ours="parallel.sequence_attention",
        values={"ring_attn": "ring", "all_to_all": "ulysses"},
        ignored=(None,),
        reason="ring_attn passes keys, all_to_all heads",
    ),
    KeyRow("plugin_config.cpu_offload", ours="parallel.cpu_offload"),
    KeyRow("plugin_config.static_graph", note="not needed: nothing is recorded from the first step"),
    KeyRow("plugin_config.reduce_bucket_size_in_m", note=_BUFFERS),
    KeyRow("plugin_config.overlap_communication", note=_BUFFERS),
    KeyRow("plugin_config.overlap_allgather", note="weights are prefetched; parallel.forward_prefetch sets how far"),
    KeyRow("plugin_config.initial_scale", note="bf16 needs no loss scale"),
    KeyRow("plugin_config.max_norm", note="grad_clip sets how gradients are clipped"),
    KeyRow("plugin_config.precision", note="dtype sets it"),
    KeyRow("plugin_config.verbose", note="there is nothing to report"),
)
ADAPTERS = (
    KeyRow("lora_config.r", ours="lora.rank", docs="`lora.rank`; 8 where it is left out"),
    KeyRow("lora_config.lora_alpha", ours="lora.alpha", docs="`lora.alpha`; 8 where it is left out"),
    KeyRow(
        "lora_config.target_modules", ours="lora.targets", docs="`lora.targets`: a list; `all-linear` is its default"
    ),
    KeyRow("lora_config.use_dora", ours="lora.dora"),
    KeyRow("lora_config.bias", only=("none", None), reason="biases do not train with adapters"),
    KeyRow("lora_config.lora_dropout", only=(0, 0.0, None), reason="adapters have no dropout of their own; write 0"),
    KeyRow("lora_config.init_lora_weights", only=(True, None), reason="adapters start at a change of zero"),
    KeyRow("lora_config.task_type", note="not needed"),
    KeyRow("lora_config.peft_type", note="not needed"),
    KeyRow("lora_checkpoint", ours="lora.from_pretrained"),
    KeyRow(
        "pretrained_lora_path",
        ours="lora.from_pretrained",
        docs="`lora.from_pretrained`, or `--lora FILE --lora-scale 0.8`",
    ),
)
MODEL = (
    KeyRow("patch_size", ours="model.patch_size"),
    KeyRow("is_causal_vae", docs="not needed: follows from `ae`; `dc_ae` is refused"),
    KeyRow("sampling_option.is_causal_vae", docs="not needed: follows from `ae`; `dc_ae` is refused"),
)
TRAINING = (
    KeyRow("grad_ckpt_setting", ours=_SETTINGS),
    KeyRow("grad_ckpt_settings", ours=_SETTINGS),
    KeyRow("model.grad_ckpt_setting", ours=_SETTINGS),
    KeyRow(
        "grad_ckpt_buffer_size",
        docs="`model.grad_ckpt_buffer_size`. The old one, outside of `model`, counts elements, this one bytes: twice "
        "as many in bf16. The scripts convert and print it",
    ),
    KeyRow(
        "grad_checkpoint",
        docs="False: `model.grad_ckpt_settings = None`; True without settings: all blocks. They save their inputs "
        'alone, as there (`model.recompute = "full"`), because batch sizes were chosen for that memory; '
        "`--model.recompute auto` takes the cheapest level that fits, which is faster",
    ),
    KeyRow("sigma_min", ours="objective.sigma_min"),
    KeyRow("ckpt_path", ours="model.from_pretrained"),
    KeyRow(
        "pin_memory_cache_pre_alloc_numels",
        note="pinned buffers are made as needed; dataset.max_host_gb bounds prefetched batches",
    ),
    KeyRow("num_bucket_build_workers", note="the order of an epoch is arithmetic on columns; no workers are needed"),
    KeyRow("batch_size", note="bucket_config sets the batch size of each bucket"),
    KeyRow("save_master_weights", note=_MASTERS),
    KeyRow("load_master_weights", note=_MASTERS),
    KeyRow("update_warmup_steps", note="the learning rate follows from the step at which a run resumes"),
    KeyRow("warmup_ae", note="the autoencoder compiles nothing unless ae.compile is set"),
    KeyRow("config_path", note="the run's folder has the whole config"),
    KeyRow("record_time", note=_TIMES),
    KeyRow("record_barrier", note=_TIMES),
    KeyRow("nsys", only=(False, None), reason="start the command under `nsys profile` yourself"),
    KeyRow("nsys_warmup_steps", note=_NO_NSYS),
    KeyRow("nsys_num_steps", note=_NO_NSYS),
    KeyRow("dataset.type", only=("video_text", None), note="the table has images and videos", reason=_STORE),
    KeyRow("dataset.rand_sample_interval", only=(None,), reason="frames are taken at an even stride"),
    KeyRow("cached_video", only=(False, None), reason=_STORE),
    KeyRow("cached_text", only=(False, None), reason=_STORE),
    KeyRow(
        "optim.cls",
        only=("HybridAdam", "FusedAdam", "CPUAdam", "AdamW", None),
        note="AdamW over shards of the weights",
        reason=_ADAMW,
    ),
    KeyRow("optim.adamw_mode", only=(True, None), reason="weight decay is decoupled, as in AdamW"),
    KeyRow("optim.amsgrad", only=(False, None), reason=_ADAMW),
    KeyRow("optim.bias_correction", only=(True, None), reason="moments are always corrected"),
    # Longtake's own keys, of which None is the default there
    KeyRow("prefetch_factor", ours="prefetch_factor", ignored=(None,)),
    KeyRow("dropout_ratio", ours="dropout_ratio", ignored=(None,)),
    KeyRow("wandb_project", ours="wandb_project", ignored=(None,)),
    KeyRow("seed", ours="seed", ignored=(None,)),
    # Longtake's own keys, which mean a little more or less than there
    KeyRow(
        "no_i2v_ref_loss",
        docs="the same name; there it does nothing, here it leaves all conditioning frames out of the loss. The loss "
        "that is prepared there leaves out the first and the last frame alone, and nothing of a clip with a "
        'conditioning frame between them: `compat = ["loss_at_ends"]`',
    ),
    KeyRow(
        "load",
        docs="the same; a checkpoint of Open-Sora is refused, because its states are of another program. "
        "`--model.from_pretrained` takes its weights",
    ),
    KeyRow("start_epoch", docs="moves the data only: the optimizer and the step counter resume"),
    KeyRow("start_step", docs="moves the data only: the optimizer and the step counter resume"),
    KeyRow("ema_decay", docs="the same; EMA weights are in fp32"),
    KeyRow(
        "async_io", docs="the same; nothing but PyTorch is needed, and checkpoints have a marker that they are whole"
    ),
    KeyRow("keep_n_latest", docs="the same; removes whole folders"),
)
INFERENCE = (
    KeyRow("resolution", ours="sampling_option.resolution", beats_ours=True, docs=_GUIDE_IN_FILES),
    KeyRow("aspect_ratio", ours="sampling_option.aspect_ratio", beats_ours=True, docs=_GUIDE_IN_FILES),
    KeyRow("num_frames", ours="sampling_option.num_frames", beats_ours=True, docs=_GUIDE_IN_FILES),
    KeyRow("num_steps", ours="sampling_option.num_steps", beats_ours=True, docs=_GUIDE_IN_FILES),
    KeyRow("guidance_img", ours="sampling_option.guidance_img", beats_ours=True, docs=_GUIDE_IN_FILES),
    KeyRow("ckpt_path", ours="model.from_pretrained", beats_ours=True),
    KeyRow("dataset.type", only=("text", None), reason="prompts are texts; `prompts` is their file"),
    KeyRow("dataset.data_path", ours="prompts"),
    KeyRow("offload", ours="offload_model", docs="`offload_model`; there documented, without effect"),
    KeyRow("sampling_option.temporal_reduction", only=(4, None), reason="the autoencoder has it in its own config"),
    KeyRow("plugin_ae", note=_TILES),
    KeyRow("plugin_config_ae", note=_TILES),
    KeyRow("config_path", note="not needed"),
    KeyRow("record_time", note="the times are printed"),
    KeyRow("prompt_refine", only=(False, None), reason=_UNPAID),
    KeyRow("refine_prompt", only=(False, None), reason=_UNPAID),
    KeyRow("motion_score", docs="the same; `dynamic` is refused: Longtake sends nothing to paid services"),
    KeyRow("seed", ours="seed", ignored=(None,)),
)


def causal_row(key: str, kind: object) -> KeyRow:
    """Whether the autoencoder is causal; only Open-Sora's high-compression one, which Longtake lacks, is not."""
    if kind in ("hunyuan_vae", None):
        fix = "Open-Sora's non-causal autoencoder is the high-compression one, which Longtake does not have"
        return KeyRow(key, only=(True, None), note=_CAUSAL, reason=fix)
    return KeyRow(key, only=(True, False, None), note=_CAUSAL)
