# LoRA on one GPU of 24 GB: the blocks' frozen weights in 4 bits, T5 in host memory.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/lora_24gb --dataset.data-path clips.parquet
#   longtake plan opensora_v2/lora_24gb --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.23 to 1, 63.50 M of the parameters train,
#       4 micro-batches a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/129f   8,580      1     6.20   0.24   0.47  0.24      1.38      0.12   12.14       20.8  8.12     3
_base_ = "lora.py"

_256px = {t: (1.0, 1) for t in [1, *range(5, 130, 4)]}

lora = dict(base="nf4")
t5 = dict(placement="offloaded")
