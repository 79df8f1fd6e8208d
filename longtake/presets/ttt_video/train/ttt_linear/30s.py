# TTT-Video with TTT-Linear, 30s: clips of 481 frames in 10 segments, from the weights of 18s.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 16 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/30s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_linear/30s --gpus 128 --gpu h100 --dataset.data-path clips.parquet
#     7.17 B parameters on 128 x h100, 73.6 GiB of 80 GiB each to be used, and 72.0 GiB of the host's memory for each
#     replicate 16, shard 4, tensor 2, zero 3, recomputed 42 transformer blocks at auto: "selective",
#       what these save in 72.0 GiB of host memory, 3.19 B of the parameters train, 1 micro-batch a rank a step
#           bucket   tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480x720/481f  163,350      1     2.41   0.00   2.97  0.00      9.04      0.67   37.41       52.5  26.6     2
_base_ = "../parts.py"

exp_name = "ttt_linear_30s"
model = dict(
    from_pretrained="outputs/ttt_linear_18s",
    mixer="ttt_linear",
    mini_batch_size=16,
    ttt_base_lr=1.0,
    grad_ckpt_buffer_size=72 * 2**30,
)
parallel = dict(replicate=16, shard=4, tensor=2)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 10
t5 = dict(max_length=497)

_steps = 500
_warmup = 50
ckpt_every = 50
