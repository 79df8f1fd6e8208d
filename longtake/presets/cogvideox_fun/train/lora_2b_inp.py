# LoRA on CogVideoX-Fun-2B-InP, which makes what masks leave out: videos from text, from a start or an end picture,
# between two, around given pixels. On one GPU of 24 GB; the run of CogVideoX-Fun's own page.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train cogvideox_fun/lora_2b_inp --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/lora_2b_inp --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     1.69 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 30 transformer blocks at auto: "selective" or "none", 58.98 M of the parameters train,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     512px/25f   7,168      1     3.37   0.00   0.44  0.00      1.14      0.11   14.73       19.8  5.61    11
_base_ = "lora_2b.py"

condition_config = dict(inpaint=1.0)  # every kind of mask in its published share; without it the model sees zeros

model = dict(
    from_pretrained="ckpts/CogVideoX-Fun-V1.1-2b-InP/transformer",
    visual="inpaint",
    positions="fun",
)
ae = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-2b-InP/vae", first_latent_alone=True)
t5 = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-2b-InP/text_encoder")
objective = dict(snr_shift=1.0)  # CogVideoX-Fun trains on the schedule without its shift
