# Text to image to video: FLUX.1-dev makes the first frame, the video model goes on from it at 256px.
#   longtake generate opensora_v2/t2i2v_256px --prompt "raining, sea"
_base_ = "256px.py"

use_t2i2v = True
img_resolution = "768px"
img_flux = dict(  # of FLUX.1's sizes, which are the defaults
    type="flux",
    from_pretrained="ckpts/flux1-dev.safetensors",
    strict_load=True,
    guidance_embed=True,
    fused_qkv=True,
    use_liger_rope=False,
    cond_embed=False,
)
img_flux_ae = dict(
    type="autoencoder_2d",
    from_pretrained="ckpts/flux1-dev-ae.safetensors",
    resolution=256,
    in_channels=3,
    ch=128,
    out_ch=3,
    ch_mult=(1, 2, 4, 4),
    num_res_blocks=2,
    z_channels=16,
    scale_factor=0.3611,
    shift_factor=0.1159,
)
guidance = 4.0  # an input of FLUX
