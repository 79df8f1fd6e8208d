# The published training from end to end: 256px text-to-video, then known frames at 256px, then 768px with 4 sequence
# peers, each from the last one's weights. The same line again goes on where it stopped; --stage NAME trains one.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/curriculum \
#       --dataset.data-path clips.parquet --model.from-pretrained ckpts/flux1-dev-fused-rope.safetensors
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 2, remat 8 double + 38 single blocks, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29     22.50   60.10      108.6  5.51     9
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29     22.50   68.17      116.6   5.8    15
#      256px/1f     260     45     5.54   0.07  11.07  0.00      9.29     22.50   64.92      113.4  5.18    56
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage1_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 2, remat 8 double + 38 single blocks, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29     22.50   60.11      108.6  5.51     9
#      768px/1f   2,312     13     5.54   0.07  11.07  0.00      9.29     22.50   68.18      116.6   5.8    15
#      256px/1f     260     45     5.54   0.07  11.07  0.00      9.29     22.50   64.92      113.4  5.18    56
#   longtake plan opensora_v2/curriculum --dataset.data-path clips.parquet --stage stage2_i2v
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used, and 50.0 GiB of the host's memory for each
#     shard 2, sequence 4, zero 2, remat 19 double + 38 single blocks,
#       inputs of recomputed blocks in 50.0 GiB of host memory, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     768px/33f  20,808     10     5.54   0.07  11.07  0.00      9.29     22.50    8.62       57.1  17.5    51
#     256px/33f   2,340     80     5.54   0.07  11.07  0.00      9.29     22.50   10.00       58.5  10.9   372

stages = [
    dict(name="stage1", run="stage1.py", max_steps=85_000),
    dict(name="stage1_i2v", run="stage1_i2v.py", max_steps=13_000),
    dict(name="stage2_i2v", run="stage2_i2v.py", max_steps=13_000),
]
