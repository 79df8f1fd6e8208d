# Videos that begin with a picture, end with one, or both, with CogVideoX-Fun-5B-InP.
#   longtake generate cogvideox_fun/i2v --prompt "rain on a pond" --ref pond.png
#   longtake generate cogvideox_fun/i2v --prompt "rain on a pond" --ref "dry.png;wet.png" --cond-type i2v_loop
_base_ = "t2v.py"

cond_type = "i2v_head"

model = dict(
    from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/transformer",
    num_layers=42,
    num_attention_heads=48,
    use_rotary_positional_embeddings=True,
    visual="inpaint",
    positions="fun",
    add_noise_in_inpaint_model=True,
)
ae = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/vae", scale_factor=0.7, first_latent_alone=True)
t5 = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/text_encoder")
objective = dict(snr_shift=1.0)
