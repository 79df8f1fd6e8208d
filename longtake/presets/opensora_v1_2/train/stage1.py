# Open-Sora 1.2, stage 1: 144p to 360p, from PixArt-Sigma, with the published numbers.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage1 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage1 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "selective" or "full",
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.56   0.00   1.12  0.56      9.20      0.12   34.86       46.4  4.56    20
#      1080p/1f   8,184      5     0.56   0.00   1.12  0.56      9.20      0.12   17.42       29.0  1.85    41
#       1024/1f   4,096     36     0.56   0.00   1.12  0.56      9.20      0.12   27.09       38.7  6.21    82
#       720p/1f   3,655     36     0.56   0.00   1.12  0.56      9.20      0.12   56.11       67.7  5.25    92
#       480p/1f   1,632     89     0.56   0.00   1.12  0.56      9.20      0.12   26.91       38.5  5.71   205
#        512/1f   1,024    141     0.56   0.00   1.12  0.56      9.20      0.12   26.98       38.5  5.82   324
#       360p/1f     925    141     0.56   0.00   1.12  0.56      9.20      0.12   56.07       67.6  5.15   358
#       240p/1f     420    297     0.56   0.00   1.12  0.56      9.20      0.12   54.31       65.9  5.49   765
#        256/1f     256    297     0.56   0.00   1.12  0.56      9.20      0.12   33.60       45.2   3.9  1215
#     144p/102f   4,500     27     0.56   0.00   1.12  0.56      9.20      0.12   52.34       63.9  6.07    73
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
