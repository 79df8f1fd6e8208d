# Videos that begin with a picture, with CogVideoX-5B-I2V (i2v: with CogVideoX-Fun).
#   longtake generate cogvideox_fun/i2v_5b --prompt "rain on a pond" --ref pond.png
_base_ = "t2v.py"

cond_type = "i2v_head"

model = dict(
    from_pretrained="ckpts/CogVideoX-5b-I2V/transformer",
    num_layers=42,
    num_attention_heads=48,
    use_rotary_positional_embeddings=True,
    use_learned_positional_embeddings=True,
    visual="image",
)
ae = dict(from_pretrained="ckpts/CogVideoX-5b-I2V/vae", scale_factor=0.7)
t5 = dict(from_pretrained="ckpts/CogVideoX-5b-I2V/text_encoder")
objective = dict(snr_shift=1.0)
