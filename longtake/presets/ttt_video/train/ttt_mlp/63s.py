# TTT-Video with TTT-MLP, 63s: clips of 1009 frames in 21 segments, from the weights of 30s.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 32 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/63s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/63s --gpus 256 --gpu h100 --dataset.data-path clips.parquet
#     7.23 B parameters on 256 x h100, 73.6 GiB of 80 GiB each to be used, and 76.0 GiB of the host's memory for each
#     replicate 16, shard 4, tensor 4, zero 3, recomputed 42 transformer blocks at auto: "selective",
#       what these save in 76.0 GiB of host memory, 3.25 B of the parameters train, 1 micro-batch a rank a step
#            bucket   tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480x720/1009f  341,550      1     1.22   0.00   1.51  0.00      9.04      0.67   48.15       60.6  40.4     1
_base_ = "../parts.py"

exp_name = "ttt_mlp_63s"
model = dict(from_pretrained="outputs/ttt_mlp_30s", grad_ckpt_buffer_size=76 * 2**30)
parallel = dict(replicate=16, shard=4, tensor=4)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 21
t5 = dict(max_length=458)

_steps = 250
_warmup = 25
ckpt_every = 25
