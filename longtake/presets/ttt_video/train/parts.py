# What all stages of TTT-Video's training have in common: clips of 16 frames a second, a caption for every 3 seconds,
# a global batch of 64, four groups of parameters. Not a run by itself.
_base_ = "../parts.py"

seed = 42
dtype = "bf16"

_segments = 1
_frames = 48 * _segments + 1
bucket_config = {"480x720": {_frames: (1.0, 1)}}
sampling_option = dict(num_frames=_frames)
dataset = dict(fps_max=16, views=1)
dropout_ratio = dict(t5=0.1)
objective = dict(uniform_sampling=True)

model = dict(recompute="auto")  # all blocks, at the cheapest level that fits
compile = "auto"  # on a GPU that has a compiler
parallel = dict(replicate=8, shard=8, zero=3)
slots_per_step = 64

_steps = 5000
_warmup = 100
_lr = 1e-5  # of what CogVideoX-5B has, and of all else in the end
_lr_ttt = 1e-5
_of_ttt = [(0, _lr_ttt / _warmup), (_warmup - 1, _lr_ttt), (_warmup, _lr_ttt, "cosine"), (_steps, _lr)]
optim = dict(
    schedule=[(0, _lr / _warmup), (_warmup - 1, _lr)],
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=1e-4,
    groups=[
        dict(
            name="ttt_no_wd",
            match=["*.ttt.*bias", "*.ttt.*norm*", "*.ttt.scan.b?"],
            schedule=_of_ttt,
            weight_decay=0.0,
        ),
        dict(name="ttt_wd", match=["*.ttt.*"], schedule=_of_ttt),
        dict(
            name="other_no_wd",
            match=["*.bias", "*.norm.weight", "*.norm_[qk].weight", "norm_final.weight"],
            weight_decay=0.0,
        ),
        dict(name="other_wd", match=["*"]),
    ],
)
grad_clip = 0.1
max_steps = _steps

ckpt_every = 500
gc_every = 50
log_every = 1
