# Videos with Wan 2.2 TI2V-5B, from a text or from a text and a first frame: five seconds at 24 frames a second.
#   longtake generate wan/ti2v_5b --prompt "rain on a pond"
#   longtake generate wan/ti2v_5b --cond-type i2v_head --ref pond.jpg --prompt "rain on a pond"
_base_ = "t2v_1_3b.py"

model = dict(
    from_pretrained="ckpts/Wan2.2-TI2V-5B",
    num_attention_heads=24,
    ffn_dim=14336,
    in_channels=48,
    out_channels=48,
    known_frames=True,
)
ae = dict(from_pretrained="ckpts/Wan2.2-TI2V-5B/Wan2.2_VAE.pth", version="2.2")
t5 = dict(from_pretrained="ckpts/Wan2.2-TI2V-5B/models_t5_umt5-xxl-enc-bf16.pth")

objective = dict(shift=5.0)
sampling_option = dict(resolution="720p", num_frames=121, guidance=5.0)
fps_save = 24
