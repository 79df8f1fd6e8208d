# The published training from end to end: 256px text-to-video, then known frames at 256px, then 768px with 4 sequence
# peers, each from the last one's weights. The same line again goes on where it stopped; --stage NAME trains one.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/curriculum \
#       --dataset.data-path clips.parquet --model.from-pretrained ckpts/flux1-dev-fused-rope.safetensors
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29      1.24   25.47       52.7  4.04    47
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29      1.24   28.90       56.1  4.25    77
#      256px/5f     520     12     5.54   0.00  11.07  0.00      9.29      0.72   76.25      102.9  1.16   209
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29      1.24   25.48       52.7  4.04    47
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29      1.24   28.91       56.1  4.25    77
#      256px/5f     520     12     5.54   0.00  11.07  0.00      9.29      0.72   76.25      102.9  1.22   209
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage2_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used, and 50.0 GiB of the host's memory for each
#     shard 2, sequence 4, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       what these save in 50.0 GiB of host memory, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#      768px/5f   4,624     10     5.54   0.00  11.07  0.00      9.29      0.72   81.72      108.3  2.02   251
#     256px/33f   2,340     80     5.54   5.20  11.07  0.00      9.29      2.63   11.20       44.9  9.11   449

stages = [
    dict(name="stage1", run="stage1.py", max_steps=85_000),
    dict(name="stage1_i2v", run="stage1_i2v.py", max_steps=13_000),
    dict(name="stage2_i2v", run="stage2_i2v.py", max_steps=13_000),
]
