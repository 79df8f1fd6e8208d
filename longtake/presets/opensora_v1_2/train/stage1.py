# Open-Sora 1.2, stage 1: 144p to 360p, from PixArt-Sigma, with the published numbers.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage1 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage1 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, remat 28 spatial + 28 temporal blocks, budget auto keeps inputs to 1,
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.56   0.00   1.12  0.56      9.20      0.12   56.13       67.7  4.47    20
#      1080p/1f   8,184      5     0.56   0.00   1.12  0.56      9.20      0.12   56.15       67.7  1.76    41
#       1024/1f   4,096     36     0.56   0.00   1.12  0.56      9.20      0.12   56.36       67.9  6.06    82
#       720p/1f   3,655     36     0.56   0.00   1.12  0.56      9.20      0.12   56.11       67.7  5.24    92
#       480p/1f   1,632     89     0.56   0.00   1.12  0.56      9.20      0.12   55.74       67.3  5.63   205
#        512/1f   1,024    141     0.56   0.00   1.12  0.56      9.20      0.12   56.27       67.8  5.76   324
#      360p/51f  13,875      8     0.56   0.00   1.12  0.56      9.20      0.12   56.29       67.9  5.76    23
#     240p/204f  25,200      5     0.56   0.00   1.12  0.56      9.20      0.12   56.32       67.9  6.38    13
#      256/408f  30,720      2     0.56   0.00   1.12  0.56      9.20      0.12   56.21       67.8  3.13    10
#     144p/204f   9,000     13     0.56   0.00   1.12  0.56      9.20      0.12   56.37       67.9  5.75    36
_base_ = "parts.py"

exp_name = "opensora_v1_2_stage1"
model = dict(from_pretrained="ckpts/PixArt-Sigma-XL-2-2K-MS.pth", strict_load=False)
# length -> (probability of the resolution, or that and of the length; batch size)
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 0.1), 5), 408: ((0.5, 0.1), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 0.1), 5), 408: ((0.4, 0.1), 2)},
    "360p": {1: (0.2, 141), 51: (0.15, 8), 102: ((0.15, 0.33), 4), 204: ((0.15, 0.1), 2), 408: ((0.15, 0.1), 1)},
    "512": {1: (0.1, 141)},
    "480p": {1: (0.1, 89)},
    "720p": {1: (0.05, 36)},
    "1024": {1: (0.05, 36)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.1, 5)},
}
condition_config = dict(
    identity=0.8,
    random=0.05,
    interpolate=0.005,
    quarter_random=0.005,
    quarter_head=0.005,
    quarter_tail=0.005,
    quarter_head_tail=0.005,
    image_random=0.025,
    image_head=0.05,
    image_tail=0.025,
    image_head_tail=0.025,
)
warmup_steps = 1000
