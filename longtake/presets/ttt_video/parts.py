# What TTT-Video is made of, at the published sizes: CogVideoX-5B with TTT-MLP, its autoencoder and text encoder. Not a
# run by itself: train/parts.py and the presets for inference have it as their base.

model = dict(
    type="ttt_video",
    from_pretrained="ckpts/CogVideoX-5b/transformer",
    mixer="ttt_mlp",
    mini_batch_size=64,
    ttt_base_lr=0.1,
    num_layers=42,
    num_attention_heads=48,
    attention_head_dim=64,
    out_channels=16,
    text_embed_dim=4096,
    time_embed_dim=512,
    patch_size=2,
    segment_frames=12,
)
ae = dict(
    type="cogvideox_vae",
    from_pretrained="ckpts/CogVideoX-5b/vae",
    scale_factor=1.0,  # CogVideoX-5B has 0.7; its weights unlearn that in the first stage
    encode_frames=48,
)
t5 = dict(
    type="text_embedder",
    from_pretrained="ckpts/CogVideoX-5b/text_encoder",
    max_length=498,
    new_tokens=("<end_scene>", "<start_scene>"),
)
objective = dict(type="v_prediction", beta_start=0.00085, beta_end=0.012, snr_shift=1.0, spacing="rescaled")

fps_save = 16
sampling_option = dict(
    resolution="480x720",
    num_frames=49,  # 48 a segment, and the first
    num_steps=50,
    solver="dpmpp_2m_sde",
    guidance=6.0,
    guidance_rule="dynamic",  # as published; "dynamic_by_step" rises from step to step
)
