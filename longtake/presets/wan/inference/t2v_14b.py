# Videos with Wan 2.1 T2V 14B, or with a training run's adapters: five seconds at sixteen frames a second.
#   longtake generate wan/t2v_14b --prompt "rain on a pond"
_base_ = "t2v_1_3b.py"

model = dict(from_pretrained="ckpts/Wan2.1-T2V-14B", num_layers=40, num_attention_heads=40, ffn_dim=13824)
ae = dict(from_pretrained="ckpts/Wan2.1-T2V-14B/Wan2.1_VAE.pth")
t5 = dict(from_pretrained="ckpts/Wan2.1-T2V-14B/models_t5_umt5-xxl-enc-bf16.pth")

objective = dict(shift=5.0)
sampling_option = dict(guidance=5.0)
