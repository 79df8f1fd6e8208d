# Videos from a first frame with both experts of Wan 2.2 I2V-A14B: five seconds at sixteen frames a second, on one GPU
# of 48 GB. Between their uses the experts are in host memory, 54 GiB of it. The image has the video's aspect ratio.
#   longtake generate wan/i2v_a14b --ref pond.jpg --prompt "rain on a pond"
#   longtake generate wan/i2v_a14b --ref pond.jpg --prompt "rain" --lora high.safetensors
_base_ = "t2v_14b.py"

model = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/high_noise_model", in_channels=36)
low_noise = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/low_noise_model", boundary=0.9)
ae = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/Wan2.1_VAE.pth")
t5 = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/models_t5_umt5-xxl-enc-bf16.pth", placement="offloaded")
cond_type = "i2v_head"
sampling_option = dict(num_steps=40, guidance=3.5, guidance_low=3.5)
