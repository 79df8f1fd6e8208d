# The run of `longtake demo`: a 1.2 M parameter MMDiT, the denoiser of Open-Sora 2.0, learns coloured shapes that move.
# Trains in minutes on two CPU cores.
#   longtake demo                                              makes the clips, trains, generates, judges, reports
#   longtake train demo/shapes --dataset.data_path clips.csv   trains alone
#
# Few tokens make steps cheap, and many steps are what counts here: 192 principal components of 8x8 pixels of all 16
# frames are one token, a sixteenth of its numbers. Predicting the clean clip, weighted as velocity, keeps such large
# patches coherent. As long as the longest clip, they hold its whole motion; overlapping, they show no edges.
_base_ = "parts.py"

exp_name = "demo"

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

_width = 96
_components = 192
_words = 128

ae = dict(type="linear", channels=_components, temporal=16, spatial=8, whitening=0.2)
t5 = dict(type="words", dim=_words, max_length=7)
clip = dict(type="words", dim=_words, max_length=7)

model = dict(
    type="flux",
    in_channels=_components,
    patch_size=1,
    hidden_size=_width,
    num_heads=3,
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

lr = 4e-3
optim = dict(lr=lr)

max_steps = 1400
ckpt_every = 400

fps_save = 8
sampling_option = dict(resolution="32px", aspect_ratio="1:1", num_frames=8, num_steps=30, guidance=2.5, flow_shift=3.0)
