# Stage 1: text-to-video at 256px, with stills up to 1024px.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage1 --dataset.data-path clips.parquet
#   longtake plan opensora_v2/stage1 --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29      1.24   25.47       52.7  4.04    47
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29      1.24   28.90       56.1  4.25    77
#      256px/5f     520     12     5.54   0.00  11.07  0.00      9.29      0.72   76.25      102.9  1.16   209
_base_ = "image.py"

dataset = dict(memory_efficient=False)

_256px = {
    1: (1.0, 45),
    5: (1.0, 12), 9: (1.0, 12), 13: (1.0, 12), 17: (1.0, 12),
    21: (1.0, 12), 25: (1.0, 12), 29: (1.0, 12), 33: (1.0, 12),
    37: (1.0, 6), 41: (1.0, 6), 45: (1.0, 6), 49: (1.0, 6), 53: (1.0, 6), 57: (1.0, 6), 61: (1.0, 6), 65: (1.0, 6),
    69: (1.0, 4), 73: (1.0, 4), 77: (1.0, 4), 81: (1.0, 4), 85: (1.0, 4), 89: (1.0, 4), 93: (1.0, 4), 97: (1.0, 4),
    101: (1.0, 3), 105: (1.0, 3), 109: (1.0, 3), 113: (1.0, 3),
    117: (1.0, 3), 121: (1.0, 3), 125: (1.0, 3), 129: (1.0, 3),
}  # fmt: skip
bucket_config = {
    "_delete_": True,
    "256px": _256px,
    "768px": {1: (0.5, 13)},
    "1024px": {1: (0.5, 7)},
}

lr = 5e-5
ckpt_every = 2000
