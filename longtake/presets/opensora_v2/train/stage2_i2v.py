# Stage 2 with known frames: text-to-video and image-to-video at 256px and 768px.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage2_i2v \
#       --dataset.data-path clips.parquet --model.from-pretrained outputs/stage1_i2v
#   longtake plan opensora_v2/stage2_i2v --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used, and 50.0 GiB of the host's memory for each
#     shard 2, sequence 4, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       what these save in 50.0 GiB of host memory, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#      768px/5f   4,624     10     5.54   0.00  11.07  0.00      9.29      0.72   81.72      108.3  2.02   251
#     256px/33f   2,340     80     5.54   5.20  11.07  0.00      9.29      2.63   11.20       44.9  9.11   449
_base_ = "stage2.py"

_256px = {
    1: (1.0, 195),
    5: (1.0, 80), 9: (1.0, 80), 13: (1.0, 80), 17: (1.0, 80),
    21: (1.0, 80), 25: (1.0, 80), 29: (1.0, 80), 33: (1.0, 80),
    37: (1.0, 40), 41: (1.0, 40), 45: (1.0, 40), 49: (1.0, 40),
    53: (1.0, 40), 57: (1.0, 40), 61: (1.0, 40), 65: (1.0, 40),
    69: (1.0, 28), 73: (1.0, 28), 77: (1.0, 28), 81: (1.0, 28),
    85: (1.0, 28), 89: (1.0, 28), 93: (1.0, 28), 97: (1.0, 28),
    101: (1.0, 23), 105: (1.0, 23), 109: (1.0, 23), 113: (1.0, 23),
    117: (1.0, 23), 121: (1.0, 23), 125: (1.0, 23), 129: (1.0, 23),
}  # fmt: skip
_768px = {
    1: (0.5, 38),
    5: (0.5, 10), 9: (0.5, 10), 13: (0.5, 10), 17: (0.5, 10),
    21: (0.5, 10), 25: (0.5, 10), 29: (0.5, 10), 33: (0.5, 10),
    37: (0.5, 5), 41: (0.5, 5), 45: (0.5, 5), 49: (0.5, 5), 53: (0.5, 5), 57: (0.5, 5), 61: (0.5, 5), 65: (0.5, 5),
    69: (0.5, 3), 73: (0.5, 3), 77: (0.5, 3), 81: (0.5, 3), 85: (0.5, 3), 89: (0.5, 3), 93: (0.5, 3), 97: (0.5, 3),
    101: (0.5, 2), 105: (0.5, 2), 109: (0.5, 2), 113: (0.5, 2),
    117: (0.5, 2), 121: (0.5, 2), 125: (0.5, 2), 129: (0.5, 2),
}  # fmt: skip
bucket_config = {"_delete_": True, "256px": _256px, "768px": _768px}

model = dict(
    cond_embed=True,
    grow_cond_in=True,  # a text-to-video model starts with an entrance of zeros for known frames
    grad_ckpt_buffer_size=2 * 25 * 2**30,  # bytes; the published 25 * 2**30 are elements of two bytes
)
condition_config = dict(t2v=1, i2v_head=5, i2v_loop=1, i2v_tail=1)
