# Open-Sora 1.2, stage 1: 144p to 360p, from PixArt-Sigma, with the published numbers.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage1 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage1 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
_base_ = "parts.py"

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
