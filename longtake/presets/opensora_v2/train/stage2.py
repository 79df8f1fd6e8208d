# Stage 2: text-to-video at 256px and 768px; 4 ranks share the tokens of a micro-batch.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage2 \
#       --dataset.data-path clips.parquet --model.from-pretrained outputs/stage1
#   longtake plan opensora_v2/stage2 --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 2, sequence 4, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#      768px/13f   9,248      6     5.54   0.00  11.07  0.00      9.29      0.72   93.13      119.7  2.64    89
#     256px/129f   8,580      6     5.54   0.00  11.07  0.00      9.29      0.72   86.77      113.4   2.6    96
_base_ = "image.py"

_256px = {
    1: (1.0, 130),
    5: (1.0, 14), 9: (1.0, 14), 13: (1.0, 14), 17: (1.0, 14),
    21: (1.0, 14), 25: (1.0, 14), 29: (1.0, 14), 33: (1.0, 14),
    37: (1.0, 10), 41: (1.0, 10), 45: (1.0, 10), 49: (1.0, 10),
    53: (1.0, 10), 57: (1.0, 10), 61: (1.0, 10), 65: (1.0, 10),
    73: (1.0, 7), 77: (1.0, 7), 81: (1.0, 7), 85: (1.0, 7), 89: (1.0, 7), 93: (1.0, 7),
    97: (1.0, 7),  # 69 is missing in the published table
    101: (1.0, 6), 105: (1.0, 6), 109: (1.0, 6), 113: (1.0, 6),
    117: (1.0, 6), 121: (1.0, 6), 125: (1.0, 6), 129: (1.0, 6),
}  # fmt: skip
_768px = {
    1: (1.0, 38),
    5: (1.0, 6), 9: (1.0, 6), 13: (1.0, 6), 17: (1.0, 6), 21: (1.0, 6), 25: (1.0, 6), 29: (1.0, 6), 33: (1.0, 6),
    37: (1.0, 4), 41: (1.0, 4), 45: (1.0, 4), 49: (1.0, 4), 53: (1.0, 4), 57: (1.0, 4), 61: (1.0, 4), 65: (1.0, 4),
    69: (1.0, 3), 73: (1.0, 3), 77: (1.0, 3), 81: (1.0, 3), 85: (1.0, 3), 89: (1.0, 3), 93: (1.0, 3), 97: (1.0, 3),
    101: (1.0, 2), 105: (1.0, 2), 109: (1.0, 2), 113: (1.0, 2),
    117: (1.0, 2), 121: (1.0, 2), 125: (1.0, 2), 129: (1.0, 2),
}  # fmt: skip
bucket_config = {"_delete_": True, "256px": _256px, "768px": _768px}

parallel = dict(tensor=1, sequence=4)

lr = 5e-5
ckpt_every = 200
