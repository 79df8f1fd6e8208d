# Stage 1 with known frames: one model for text-to-video and image-to-video at 256px.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage1_i2v \
#       --dataset.data-path clips.parquet --model.from-pretrained outputs/stage1
#   longtake plan opensora_v2/stage1_i2v --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29      1.24   25.48       52.7  4.04    47
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29      1.24   28.91       56.1  4.25    77
#      256px/5f     520     12     5.54   0.00  11.07  0.00      9.29      0.72   76.25      102.9  1.22   209
_base_ = "stage1.py"

model = dict(
    cond_embed=True,
    grow_cond_in=True,  # a text-to-video model starts with an entrance of zeros for known frames
)
condition_config = dict(t2v=1, i2v_head=5, i2v_loop=1, i2v_tail=1)

lr = 1e-5
