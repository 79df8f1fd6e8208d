# Videos that move as a control video does (poses, edges, depth), with CogVideoX-Fun-5B-Control.
#   longtake generate cogvideox_fun/v2v_control --prompt "a dancer in a park" --companions.control poses.mp4
_base_ = "t2v.py"

model = dict(
    from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-Control/transformer",
    num_layers=42,
    num_attention_heads=48,
    use_rotary_positional_embeddings=True,
    visual="control",
    positions="fun",
)
ae = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-Control/vae", scale_factor=0.7, first_latent_alone=True)
t5 = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-Control/text_encoder")
objective = dict(snr_shift=1.0)

sampling_option = dict(aspect_ratio="1.75")  # 672 x 384
