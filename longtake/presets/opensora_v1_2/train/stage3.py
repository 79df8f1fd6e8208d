# Open-Sora 1.2, stage 3: up to 720p, from the weights of stage 2.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/stage3 --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/stage3 --gpus 8 --gpu h100 --dataset.data-path clips.parquet
_base_ = "parts.py"

model = dict(from_pretrained="outputs/stage2")
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
