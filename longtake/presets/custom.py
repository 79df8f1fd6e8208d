# Start from here for your own clips: docs/data.md shows how their table is made.
#   longtake train custom --dataset.data_path good.parquet
#
# A small model on today's parts: an autoencoder that folds pixels into channels and an encoder that gives each word a
# fixed vector. Neither is learned or downloaded. It trains on one GPU, or slowly on a CPU.

exp_name = "custom"  # name of the run's folder in outputs/
dtype = "bf16"
compile = "auto"  # on a GPU that has a compiler

# What to train on. A clip faster than fps_max is read with a stride, so 25 and 30 frames a second become 12 and 15.
dataset = dict(
    data_path="good.parquet",  # seen from the folder that the command is started in
    fps_max=24,
)

# Shapes of a batch: resolution -> frames -> (share of the clips kept, clips in a batch). 64px is the area of 64 x 64
# pixels, in the aspect ratio nearest to each clip's; 1 is for stills. `longtake data stats TABLE --run FILE` shows what
# your clips make of it. Larger shapes and batches need more memory.
bucket_config = {
    "64px": {
        1: (1.0, 32),
        16: (1.0, 8),
        32: (1.0, 4),
    },
}

_words = 128
ae = dict(type="pixel", temporal=8, spatial=8, overlap=True)  # 8 frames of 8 x 8 pixels become one latent pixel
t5 = dict(type="words", dim=_words, max_length=32)  # captions are cut after so many words
clip = dict(type="words", dim=_words, max_length=32)

model = dict(
    type="flux",
    in_channels=3 * 8 * 8 * 8,  # what the autoencoder makes: colours x temporal x spatial x spatial
    patch_size=1,
    context_in_dim=_words,  # t5.dim
    vec_in_dim=_words,  # clip.dim
    hidden_size=256,  # num_heads x the sum of axes_dim
    num_heads=8,
    axes_dim=(8, 12, 12),
    depth=2,
    depth_single_blocks=6,
    theta=100,
    init="zero_gate",
    fused_qkv=True,
)

# Such large patches stay coherent where the clean clip is predicted.
objective = dict(predict="clean", shift=None, timestep_mean=1.5, timestep_std=1.2, min_t=0.5)
dropout_ratio = dict(t5=0.1, clip=0.1)

lr = 1e-3
eps = 1e-8
optim = dict(betas=(0.9, 0.98), weight_decay=0.01)
warmup_steps = 100
ema_decay = 0.999

max_steps = 20_000
ckpt_every = 1000  # steps; Ctrl-C writes a checkpoint too
keep_n_latest = 2
log_every = 10
num_workers = 2  # processes that decode

fps_save = 12
sampling_option = dict(
    resolution="64px", aspect_ratio="16:9", num_frames=16, num_steps=20, guidance=2.0, flow_shift=3.0
)
