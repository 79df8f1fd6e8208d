# What Open-Sora 1.2 is made of, at the published sizes: denoiser (STDiT3-XL/2), autoencoder, text encoder and
# objective. Not a run by itself: train/parts.py and inference/240p.py, the roots of the other presets, have it as
# their base.

model = dict(
    type="stdit3",
    in_channels=4,
    hidden_size=1152,
    depth=28,
    num_heads=16,
    mlp_ratio=4.0,
    patch_size=(1, 2, 2),
    caption_channels=4096,
    model_max_length=300,
    input_sq_size=512,
    pred_sigma=True,
    qk_norm=True,
)
ae = dict(type="opensora_vae_v1_2", from_pretrained="hpcai-tech/OpenSora-VAE-v1.2/model.safetensors")
t5 = dict(type="text_embedder", from_pretrained="DeepFloyd/t5-v1_1-xxl", max_length=300, mask=True, shardformer=True)
objective = dict(type="flow_1000", sample_method="logit-normal", use_timestep_transform=True)
