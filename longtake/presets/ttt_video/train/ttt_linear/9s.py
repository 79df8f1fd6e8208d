# TTT-Video with TTT-Linear, 9s: clips of 145 frames in 3 segments, from the weights of 3s.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/9s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_linear/9s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
#     7.17 B parameters on 64 x h100, 73.6 GiB of 80 GiB each to be used, and 28.0 GiB of the host's memory for each
#     replicate 8, shard 8, zero 3, recomputed 42 transformer blocks at auto: "selective",
#       what these save in 28.0 GiB of host memory, 3.19 B of the parameters train, 1 micro-batch a rank a step
#           bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU   s  fits
#     480x720/145f  49,950      1     2.41   0.00   2.97  0.00      9.04      0.67   38.45       53.5  12     3
_base_ = "../parts.py"

exp_name = "ttt_linear_9s"
model = dict(
    from_pretrained="outputs/ttt_linear_3s",
    mixer="ttt_linear",
    mini_batch_size=16,
    ttt_base_lr=1.0,
    grad_ckpt_buffer_size=28 * 2**30,
)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 3
t5 = dict(max_length=502)
