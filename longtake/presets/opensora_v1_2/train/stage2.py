# Open-Sora 1.2, stage 2: longer and larger clips, from the weights of stage 1; its published file has no warm-up.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage2 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage2 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "selective" or "full",
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.56   0.00   1.12  0.56      9.20      0.12   34.86       46.4  4.56    20
#      1080p/1f   8,184      5     0.56   0.00   1.12  0.56      9.20      0.12   17.42       29.0  1.85    41
#       1024/1f   4,096     36     0.56   0.00   1.12  0.56      9.20      0.12   27.09       38.7  6.21    82
#       720p/1f   3,655     36     0.56   0.00   1.12  0.56      9.20      0.12   56.11       67.7  5.25    92
#      480p/51f  24,480      5     0.56   0.00   1.12  0.56      9.20      0.12   52.60       64.2  6.59    13
#      512/204f  61,440      2     0.56   0.00   1.12  0.56      9.20      0.12   52.80       64.4  6.59     5
#       360p/1f     925    141     0.56   0.00   1.12  0.56      9.20      0.12   56.07       67.6  5.15   358
#       240p/1f     420    297     0.56   0.00   1.12  0.56      9.20      0.12   54.31       65.9  5.49   765
#        256/1f     256    297     0.56   0.00   1.12  0.56      9.20      0.12   33.60       45.2   3.9  1215
#     144p/102f   4,500     27     0.56   0.00   1.12  0.56      9.20      0.12   52.34       63.9  6.07    73
_base_ = "parts.py"

exp_name = "opensora_v1_2_stage2"
model = dict(from_pretrained="outputs/opensora_v1_2_stage1")
# length -> (probability of the resolution, or that and of the length; batch size)
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 1.0), 5), 408: ((0.5, 1.0), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 1.0), 5), 408: ((0.4, 1.0), 2)},
    "360p": {1: (0.5, 141), 51: (0.15, 8), 102: ((0.3, 0.5), 4), 204: ((0.3, 1.0), 2), 408: ((0.5, 0.5), 1)},
    "512": {1: (0.4, 141), 51: (0.15, 8), 102: ((0.2, 0.4), 4), 204: ((0.2, 1.0), 2), 408: ((0.4, 0.5), 1)},
    "480p": {1: (0.5, 89), 51: (0.2, 5), 102: (0.2, 2), 204: (0.1, 1)},
    "720p": {1: (0.1, 36), 51: (0.03, 1)},
    "1024": {1: (0.1, 36), 51: (0.02, 1)},
    "1080p": {1: (0.01, 5)},
    "2048": {1: (0.01, 5)},
}
condition_config = dict(
    identity=0.75,
    random=0.005,
    interpolate=0.002,
    quarter_random=0.007,
    quarter_head=0.002,
    quarter_tail=0.002,
    quarter_head_tail=0.002,
    image_head=0.22,
    image_tail=0.005,
    image_head_tail=0.005,
)
warmup_steps = None
