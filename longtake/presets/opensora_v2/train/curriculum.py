# The published training from end to end: 256px text-to-video, then known frames at 256px, then 768px with 4 sequence
# peers, each from the last one's weights. The same line again goes on where it stopped; --stage NAME trains one.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/curriculum \
#       --dataset.data-path clips.parquet --model.from-pretrained ckpts/flux1-dev-fused-rope.safetensors
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.00  11.07  0.00      9.29      0.72   92.77      119.4  3.56    47
#      768px/1f   2,312     13     5.54   0.00  11.07  0.00      9.29      0.72   93.61      120.2  3.76    77
#     256px/29f   2,080     12     5.54   0.00  11.07  0.00      9.29      0.72   93.56      120.2  3.83    84
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.00  11.07  0.00      9.29      0.72   92.77      119.4  3.56    47
#      768px/1f   2,312     13     5.54   0.00  11.07  0.00      9.29      0.72   93.61      120.2  3.76    77
#     256px/29f   2,080     12     5.54   0.00  11.07  0.00      9.29      0.72   93.56      120.2   3.9    84
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage2_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used, and 50.0 GiB of the host's memory for each
#     shard 2, sequence 4, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1,
#       inputs of recomputed blocks and what they keep in 50.0 GiB of host memory, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     768px/57f  34,680      5     5.54   0.00  11.07  0.00      9.29      0.72   93.64      120.3  13.9    36
#     256px/93f   6,240     28     5.54   0.00  11.07  0.00      9.29      0.72   93.64      120.3  8.98   191

stages = [
    dict(name="stage1", run="stage1.py", max_steps=85_000),
    dict(name="stage1_i2v", run="stage1_i2v.py", max_steps=13_000),
    dict(name="stage2_i2v", run="stage2_i2v.py", max_steps=13_000),
]
