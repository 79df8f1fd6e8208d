# Full tuning of CogVideoX-5B, on one GPU of 80 GB: bf16 weights with stochastic rounding, 8-bit moments.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train cogvideox_fun/full_5b --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/full_5b --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     5.57 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used
#     zero 3, recomputed 42 transformer blocks at auto: "selective" or "none", bf16 masters, 8-bit moments,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     512px/29f   8,192      1    10.38   0.00  10.54  0.00      1.14      0.28   45.04       67.4  1.18    15
_base_ = "lora_5b.py"

lora = None
master_dtype = "bf16"
optim = dict(states="8bit")

lr = 2e-5
warmup_steps = 100
