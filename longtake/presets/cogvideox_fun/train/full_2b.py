# Full tuning of CogVideoX-2B, on 8 GPUs of 80 GB, with the numbers of CogVideoX-Fun's page.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train cogvideox_fun/full_2b --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/full_2b --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     1.69 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 30 transformer blocks at auto: "none", 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU    s  fits
#     512px/49f  13,312      1     0.79   0.00   1.58  0.00      2.00      0.23   32.43       37.0  1.3    25
_base_ = "lora_2b.py"

lora = None
t5 = dict(placement="sharded")

lr = 2e-5
warmup_steps = 100
