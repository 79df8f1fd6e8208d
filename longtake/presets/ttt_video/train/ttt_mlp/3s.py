# TTT-Video with TTT-MLP, 3s: clips of 49 frames in 1 segment, from CogVideoX-5B.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/3s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/3s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
#     7.23 B parameters on 64 x h100, 73.6 GiB of 80 GiB each to be used
#     replicate 8, shard 8, zero 3, recomputed 42 transformer blocks at auto: "selective", 1 micro-batch a rank a step
#          bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480x720/49f  17,550      1     3.37   0.08   6.73  0.00      9.04      1.38   30.04       50.6  4.37     5
_base_ = "../parts.py"

exp_name = "ttt_mlp_3s"

t5 = dict(max_length=498)

_lr_ttt = 1e-4
