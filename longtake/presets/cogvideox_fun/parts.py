# What CogVideoX-2B is made of, at the published sizes: denoiser, autoencoder, text encoder and schedule. Not a run by
# itself: train/lora_2b.py and inference/t2v.py, the roots of the other presets, have it as their base.

model = dict(
    type="cogvideox",
    from_pretrained="ckpts/CogVideoX-2b/transformer",
    num_layers=30,
    num_attention_heads=30,
    attention_head_dim=64,
    out_channels=16,
    text_embed_dim=4096,
    max_text_seq_length=226,
    time_embed_dim=512,
    patch_size=2,
    sample_height=60,
    sample_width=90,
    sample_frames=49,
)
ae = dict(
    type="cogvideox_vae",
    from_pretrained="ckpts/CogVideoX-2b/vae",
    scale_factor=1.15258426,
)
t5 = dict(type="text_embedder", from_pretrained="ckpts/CogVideoX-2b/text_encoder", max_length=226)
objective = dict(type="v_prediction", beta_start=0.00085, beta_end=0.012, snr_shift=3.0, spacing="trailing")
