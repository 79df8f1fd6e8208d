# From PixArt-Sigma to STDiT3, before stage 1, in eight steps: images of many sizes on PixArt's objective and latents,
# norms of queries and keys, rectified flow, its law of times, a smaller eps, the new autoencoder with frame rates, then
# temporal blocks. Open-Sora 1.2 published their lengths, on 8 GPUs, alone; the tables of buckets are ours.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v1_2/adapt --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/adapt --gpus 8 --gpu h100 --dataset.data-path clips.parquet --stage temporal_videos
#     1.21 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "none", 595.16 M of the parameters train,
#       1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU      s  fits
#     360p/17f   4,625      4     0.42   0.00   0.55  0.28      9.20      0.12   28.27       38.9  0.829    72
#     240p/17f   2,100      9     0.42   0.00   0.55  0.28      9.20      0.12   29.08       39.7  0.845   158
#     144p/17f     750     25     0.42   0.00   0.55  0.28      9.20      0.11   29.50       40.1  0.877   435
_base_ = "parts.py"

exp_name = "opensora_v1_2_adapt"
model = dict(from_pretrained="ckpts/PixArt-Sigma-XL-2-2K-MS.pth", strict_load=False)
bucket_config = {
    "144p": {1: (1.0, 128)},
    "256": {1: (0.4, 75)},
    "240p": {1: (0.3, 45)},
    "360p": {1: (0.2, 20)},
    "512": {1: (0.1, 18)},
    "480p": {1: (0.1, 11)},
    "720p": {1: (0.05, 5)},
    "1024": {1: (0.05, 4)},
}
warmup_steps = None
ckpt_every = 500

_masks = dict(
    identity=0.5,
    random=0.2,
    interpolate=0.01,
    quarter_random=0.01,
    quarter_head=0.01,
    quarter_tail=0.01,
    quarter_head_tail=0.01,
    image_random=0.05,
    image_head=0.1,
    image_tail=0.05,
    image_head_tail=0.05,
)
_pixart = dict(
    type="opensora_vae_v1_2",
    spatial_only=True,
    spatial_scale=0.13025,
    from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers/vae/diffusion_pytorch_model.safetensors",
)
_of_images = dict(freeze=("temporal_blocks", "fps_embedder"), ae=_pixart)
_uniform = dict(sample_method="uniform", use_timestep_transform=False)
stages = [
    dict(
        name="sizes",
        max_steps=20_000,
        model=dict(qk_norm=False),
        objective=dict(_delete_=True, type="noise_prediction"),
        sampling_option=dict(solver="ddim"),
        eps=1e-8,
        **_of_images,
    ),
    dict(
        name="norms",
        max_steps=18_000,
        objective=dict(_delete_=True, type="noise_prediction"),
        sampling_option=dict(solver="ddim"),
        eps=1e-8,
        **_of_images,
    ),
    dict(name="flow", max_steps=10_000, objective=_uniform, eps=1e-8, **_of_images),
    dict(name="times", max_steps=33_000, eps=1e-8, **_of_images),
    dict(name="eps", max_steps=8_000, **_of_images),
    dict(name="fps", max_steps=25_000, freeze=("temporal_blocks",)),
    dict(name="temporal_images", max_steps=3_000, freeze=()),
    dict(
        name="temporal_videos",
        max_steps=38_000,
        freeze=(),
        train_only=("temporal_blocks",),
        bucket_config={
            "_delete_": True,
            "144p": {
                17: (1.0, 25),
                34: (1.0, 12),
                51: (1.0, 8),
                68: (1.0, 6),
                102: (1.0, 4),
                136: (1.0, 3),
                204: (1.0, 2),
            },
            "240p": {17: (0.5, 9), 34: (0.5, 4), 51: (0.5, 3), 68: (0.5, 2), 102: (0.5, 1), 136: (0.5, 1)},
            "360p": {17: (0.3, 4), 34: (0.3, 2), 51: (0.3, 1)},
        },
        condition_config=_masks,
    ),
]
