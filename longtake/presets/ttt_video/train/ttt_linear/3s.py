# TTT-Video with TTT-Linear, 3s: clips of 49 frames in 1 segment, from CogVideoX-5B.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/3s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_linear/3s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
#     7.17 B parameters on 64 x h100, 73.6 GiB of 80 GiB each to be used
#     replicate 8, shard 8, zero 3, recomputed 42 transformer blocks at auto: "selective",
#       3.19 B of the parameters train, 1 micro-batch a rank a step
#          bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU    s  fits
#     480x720/49f  17,550      1     2.41   0.00   2.97  0.00      9.04      0.00   29.05       43.5  4.1     6
_base_ = "../parts.py"

exp_name = "ttt_linear_3s"
model = dict(mixer="ttt_linear", mini_batch_size=16, ttt_base_lr=1.0)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

t5 = dict(max_length=498)

_lr_ttt = 1e-4
