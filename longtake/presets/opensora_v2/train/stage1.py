# Stage 1: text-to-video at 256px, with stills up to 1024px.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage1 --dataset.data-path clips.parquet
#   longtake plan opensora_v2/stage1 --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.00  11.07  0.00      9.29      0.72   64.05       90.7  3.94    47
#      768px/1f   2,312     13     5.54   0.00  11.07  0.00      9.29      0.72   72.64       99.3  4.04    76
#     256px/89f   5,980      4     5.54   0.00  11.07  0.00      9.29      0.72   90.10      116.7  4.27    33
_base_ = "image.py"

dataset = dict(memory_efficient=False)

_256px = {
    1: (1.0, 45),
    **{t: (1.0, 12) for t in range(5, 34, 4)},
    **{t: (1.0, 6) for t in range(37, 66, 4)},
    **{t: (1.0, 4) for t in range(69, 98, 4)},
    **{t: (1.0, 3) for t in range(101, 130, 4)},
}
bucket_config = {
    "_delete_": True,
    "256px": _256px,
    "768px": {1: (0.5, 13)},
    "1024px": {1: (0.5, 7)},
}

lr = 5e-5
ckpt_every = 2000
