# LoRA on the released weights, on one GPU of 80 GB.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/lora --dataset.data-path clips.parquet
#   longtake plan opensora_v2/lora --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used
#     zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       63.50 M of the parameters train, 4 micro-batches a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU      s  fits
#     256px/37f   2,600      2    22.39   0.24   0.47  0.24      9.29      0.12   36.51       69.2  0.703    27
_base_ = "finetune.py"

_256px = {
    1: (1.0, 8),
    5: (1.0, 2), 9: (1.0, 2), 13: (1.0, 2), 17: (1.0, 2), 21: (1.0, 2), 25: (1.0, 2), 29: (1.0, 2), 33: (1.0, 2),
    37: (1.0, 2), 41: (1.0, 2), 45: (1.0, 2), 49: (1.0, 2), 53: (1.0, 2), 57: (1.0, 2), 61: (1.0, 2), 65: (1.0, 2),
    69: (1.0, 1), 73: (1.0, 1), 77: (1.0, 1), 81: (1.0, 1), 85: (1.0, 1), 89: (1.0, 1), 93: (1.0, 1), 97: (1.0, 1),
    101: (1.0, 1), 105: (1.0, 1), 109: (1.0, 1), 113: (1.0, 1),
    117: (1.0, 1), 121: (1.0, 1), 125: (1.0, 1), 129: (1.0, 1),
}  # fmt: skip
accumulation_steps = 4

lora = dict(rank=16, alpha=16)
t5 = dict(placement="resident")

lr = 1e-4
ema_decay = 0.99
