# Full fine-tuning on one GPU of 80 GB: bf16 weights with stochastic rounding, 8-bit moments and T5 in host memory.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/finetune_1gpu --dataset.data-path clips.parquet
#   longtake plan opensora_v2/finetune_1gpu --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used, and 22.5 GiB of the host's memory for each
#     zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none", bf16 masters, 8-bit moments,
#       moments in host memory, 8 micro-batches a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU      s  fits
#     256px/49f   3,380      1    22.15  22.15   0.00  0.00      1.38      1.42   23.17       70.3  0.614    14
_base_ = "finetune.py"

_256px = {
    1: (1.0, 4),
    5: (1.0, 1), 9: (1.0, 1), 13: (1.0, 1), 17: (1.0, 1), 21: (1.0, 1), 25: (1.0, 1), 29: (1.0, 1), 33: (1.0, 1),
    37: (1.0, 1), 41: (1.0, 1), 45: (1.0, 1), 49: (1.0, 1), 53: (1.0, 1), 57: (1.0, 1), 61: (1.0, 1), 65: (1.0, 1),
    69: (1.0, 1), 73: (1.0, 1), 77: (1.0, 1), 81: (1.0, 1), 85: (1.0, 1), 89: (1.0, 1), 93: (1.0, 1), 97: (1.0, 1),
    101: (1.0, 1), 105: (1.0, 1), 109: (1.0, 1), 113: (1.0, 1),
    117: (1.0, 1), 121: (1.0, 1), 125: (1.0, 1), 129: (1.0, 1),
}  # fmt: skip
accumulation_steps = 8

master_dtype = "bf16"
optim = dict(states="8bit", offload=True)
t5 = dict(placement="offloaded")
