# TTT-Video with TTT-MLP, 18s: clips of 289 frames in 6 segments, from the weights of 9s.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/18s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/18s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
#     7.23 B parameters on 64 x h100, 73.6 GiB of 80 GiB each to be used, and 96.0 GiB of the host's memory for each
#     replicate 8, shard 8, zero 3, recomputed 42 transformer blocks at auto: "selective",
#       what these save in 96.0 GiB of host memory, 3.25 B of the parameters train, 1 micro-batch a rank a step
#           bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480x720/289f  98,550      1     2.44   0.00   3.02  0.00      9.04      0.67   48.17       63.3  24.1     2
_base_ = "../parts.py"

exp_name = "ttt_mlp_18s"
model = dict(from_pretrained="outputs/ttt_mlp_9s", grad_ckpt_buffer_size=96 * 2**30)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 6
t5 = dict(max_length=471)

_steps = 1000
_warmup = 50
