# LoRA on CogVideoX-Fun-5B-InP, on one GPU of 24 GB: the blocks' frozen weights in 8 bits.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train cogvideox_fun/lora_5b_inp --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/lora_5b_inp --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     5.57 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 42 transformer blocks at auto: "selective", 132.12 M of the parameters train,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     512px/49f  13,312      1     5.71   0.00   0.98  0.00      1.14      0.25    8.57       16.6  16.4     2
_base_ = "lora_5b.py"

condition_config = dict(inpaint=1.0)  # every kind of mask in its published share; without it the model sees zeros

model = dict(
    from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/transformer",
    visual="inpaint",
    positions="fun",
    add_noise_in_inpaint_model=True,  # on given pixels, as V1.1 of 5B was trained
)
ae = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/vae", first_latent_alone=True)
t5 = dict(from_pretrained="ckpts/CogVideoX-Fun-V1.1-5b-InP/text_encoder")
