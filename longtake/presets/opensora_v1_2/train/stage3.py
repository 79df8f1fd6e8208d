# Open-Sora 1.2, stage 3: up to 720p, from the weights of stage 2.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage3 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage3 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "selective" or "full",
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.56   0.00   1.12  0.56      9.20      0.12   34.86       46.4  4.56    20
#      1080p/1f   8,184      5     0.56   0.00   1.12  0.56      9.20      0.12   17.42       29.0  1.85    41
#      1024/51f  61,440      2     0.56   0.00   1.12  0.56      9.20      0.12   52.79       64.4  7.27     5
#       720p/1f   3,655     36     0.56   0.00   1.12  0.56      9.20      0.12   56.11       67.7  5.25    92
#      480p/51f  24,480      5     0.56   0.00   1.12  0.56      9.20      0.12   52.60       64.2  6.59    13
#      512/204f  61,440      2     0.56   0.00   1.12  0.56      9.20      0.12   52.80       64.4  6.59     5
#       360p/1f     925    141     0.56   0.00   1.12  0.56      9.20      0.12   56.07       67.6  5.15   358
#       240p/1f     420    297     0.56   0.00   1.12  0.56      9.20      0.12   54.31       65.9  5.49   765
#        256/1f     256    297     0.56   0.00   1.12  0.56      9.20      0.12   33.60       45.2   3.9  1215
#     144p/102f   4,500     27     0.56   0.00   1.12  0.56      9.20      0.12   52.34       63.9  6.07    73
_base_ = "parts.py"

exp_name = "opensora_v1_2_stage3"
model = dict(from_pretrained="outputs/opensora_v1_2_stage2")
# length -> (probability of the resolution, or that and of the length; batch size)
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: (1.0, 27), 204: (1.0, 13), 408: (1.0, 6)},
    "256": {1: (1.0, 297), 51: (0.5, 20), 102: (0.5, 10), 204: (0.5, 5), 408: ((0.5, 0.5), 2)},
    "240p": {1: (1.0, 297), 51: (0.5, 20), 102: (0.5, 10), 204: (0.5, 5), 408: ((0.5, 0.4), 2)},
    "360p": {1: (1.0, 141), 51: (0.5, 8), 102: (0.5, 4), 204: (0.5, 2), 408: ((0.5, 0.3), 1)},
    "512": {1: (1.0, 141), 51: (0.5, 8), 102: (0.5, 4), 204: (0.5, 2), 408: ((0.5, 0.2), 1)},
    "480p": {1: (1.0, 89), 51: (0.5, 5), 102: (0.5, 3), 204: ((0.5, 0.5), 1), 408: (0.0, None)},
    "720p": {1: (0.3, 36), 51: (0.2, 2), 102: (0.1, 1), 204: (0.0, None)},
    "1024": {1: (0.3, 36), 51: (0.1, 2), 102: (0.1, 1), 204: (0.0, None)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.05, 5)},
}
condition_config = dict(
    identity=0.75,
    random=0.01,
    interpolate=0.002,
    quarter_random=0.002,
    quarter_head=0.002,
    quarter_tail=0.002,
    quarter_head_tail=0.002,
    image_head=0.22,
    image_tail=0.005,
    image_head_tail=0.005,
)
warmup_steps = 1000
