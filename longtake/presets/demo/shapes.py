# The demo's run: a 2.8 M parameter MMDiT learns coloured shapes that move. Trains in minutes on two CPU cores.
#   longtake demo                                              makes the clips, trains, generates, judges, reports
#   longtake train demo/shapes --dataset.data_path clips.csv   trains alone
#
# Few large space-time patches (8x8 pixels of all 16 frames are one token) make steps cheap, and many steps are what
# counts here; predicting the clean clip, weighted as velocity, keeps such large patches coherent. As long as the
# longest clip, they hold its whole motion; overlapping, they show no edges.

exp_name = "demo"
seed = 42
dtype = "bf16"
cpu_threads = 1  # its operations are too small for more; the loader has the other core
parallel = dict(zero=2)  # weights this small stay gathered between forward and backward

dataset = dict(
    data_path="clips.parquet",
    fps_max=24,
    cache_mb=256,
)

bucket_config = {
    "32px": {
        1: (1.0, 32),
        8: (1.0, 32),
        16: (1.0, 32),
    },
}

_width = 128
_words = 128

ae = dict(type="pixel", temporal=16, spatial=8, overlap=True)
t5 = dict(type="words", dim=_words, max_length=6)
clip = dict(type="words", dim=_words, max_length=6)

model = dict(
    type="flux",
    in_channels=3 * 16 * 8 * 8,
    patch_size=1,
    hidden_size=_width,
    num_heads=4,
    axes_dim=(8, 12, 12),
    theta=100,
    depth=1,
    depth_single_blocks=5,
    init="zero_gate",
    vec_in_dim=_words,
    context_in_dim=_words,
    fused_qkv=True,
    attention="auto",
)

objective = dict(predict="clean", shift=None, timestep_mean=1.5, timestep_std=1.2, min_t=0.5)
dropout_ratio = dict(t5=0.1, clip=0.1)

lr = 1.5e-3
eps = 1e-8
optim = dict(lr=lr, eps=eps, betas=(0.9, 0.98), weight_decay=0.01)
warmup_steps = 50
decay_fraction = 0.4
final_lr_ratio = 0.02
grad_clip = 1.0
ema_decay = 0.995

max_steps = 3000
num_workers = 1
prefetch_factor = 4
log_every = 100
ckpt_every = 600
keep_n_latest = 2

fps_save = 8
sampling_option = dict(resolution="32px", aspect_ratio="1:1", num_frames=8, num_steps=30, guidance=2.0, flow_shift=3.0)
