# Videos with both experts of Wan 2.2 T2V-A14B: five seconds at sixteen frames a second, on one GPU of 48 GB. Between
# their uses the experts are in host memory, 54 GiB of it.
#   longtake generate wan/t2v_a14b --prompt "rain on a pond"
#   longtake generate wan/t2v_a14b --lora high.safetensors --low-noise.lora low.safetensors --prompt "rain on a pond"
_base_ = "t2v_14b.py"

model = dict(from_pretrained="ckpts/Wan2.2-T2V-A14B/high_noise_model")
low_noise = dict(from_pretrained="ckpts/Wan2.2-T2V-A14B/low_noise_model", boundary=0.875)
ae = dict(from_pretrained="ckpts/Wan2.2-T2V-A14B/Wan2.1_VAE.pth")
t5 = dict(from_pretrained="ckpts/Wan2.2-T2V-A14B/models_t5_umt5-xxl-enc-bf16.pth", placement="offloaded")
objective = dict(shift=12.0)
sampling_option = dict(num_steps=40, guidance=4.0, guidance_low=3.0)
