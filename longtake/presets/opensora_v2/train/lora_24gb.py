# LoRA on one GPU of 24 GB: the blocks' frozen weights in 4 bits, T5 in host memory.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/lora_24gb --dataset.data-path clips.parquet
#   longtake plan opensora_v2/lora_24gb --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 19 double + 38 single blocks at auto: "selective", 63.50 M of the parameters train,
#       4 micro-batches a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/125f   8,320      1     6.20   0.24   0.47  0.24      1.38      0.00   11.23       19.7  8.19     3
_base_ = "lora.py"

_256px = {
    1: (1.0, 1), 5: (1.0, 1), 9: (1.0, 1), 13: (1.0, 1), 17: (1.0, 1), 21: (1.0, 1), 25: (1.0, 1), 29: (1.0, 1),
    33: (1.0, 1), 37: (1.0, 1), 41: (1.0, 1), 45: (1.0, 1), 49: (1.0, 1), 53: (1.0, 1), 57: (1.0, 1), 61: (1.0, 1),
    65: (1.0, 1), 69: (1.0, 1), 73: (1.0, 1), 77: (1.0, 1), 81: (1.0, 1), 85: (1.0, 1), 89: (1.0, 1), 93: (1.0, 1),
    97: (1.0, 1), 101: (1.0, 1), 105: (1.0, 1), 109: (1.0, 1),
    113: (1.0, 1), 117: (1.0, 1), 121: (1.0, 1), 125: (1.0, 1),
    129: (1.0, 1),
}  # fmt: skip

lora = dict(base="nf4")
t5 = dict(placement="offloaded")
