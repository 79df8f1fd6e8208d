# What Open-Sora 2.0 is made of, at the published sizes: denoiser, autoencoder and text encoders. Not a run by itself:
# train/image.py and inference/256px.py, the roots of the other presets, have it as their base.

model = dict(
    type="flux",
    guidance_embed=False,
    fused_qkv=False,
    use_liger_rope=True,
    in_channels=64,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    mlp_ratio=4.0,
    num_heads=24,
    depth=19,
    depth_single_blocks=38,
    axes_dim=(16, 56, 56),
    theta=10_000,
    qkv_bias=True,
)
ae = dict(
    type="hunyuan_vae",
    from_pretrained="ckpts/hunyuan_vae.safetensors",
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    latent_channels=16,
    use_spatial_tiling=True,
    use_temporal_tiling=False,
)
t5 = dict(type="text_embedder", from_pretrained="google/t5-v1_1-xxl", max_length=512, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="openai/clip-vit-large-patch14", max_length=77)
