# LoRA on the high-noise expert of Wan 2.2 I2V-A14B, the first frame of each clip given, at 480 x 832 and 33 frames,
# on one GPU of 24 GB and 8 GiB of pinned host memory: the blocks' frozen weights in 4 bits. `lora_i2v_a14b_low`
# trains the other expert.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train wan/lora_i2v_a14b_high --dataset.data-path clips.parquet
#   longtake plan wan/lora_i2v_a14b_high --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     14.29 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used, and 8.0 GiB of the host's memory for each
#     zero 3, recomputed 40 transformer blocks at auto: "full", what these save in 8.0 GiB of host memory,
#       153.35 M of the parameters train, 1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480p/33f  14,508      1     7.97   0.00   1.14  0.00      2.77      0.29    7.40       19.6  22.1     1
_base_ = "lora_14b.py"

model = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/high_noise_model", in_channels=36)
ae = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/Wan2.1_VAE.pth")
t5 = dict(from_pretrained="ckpts/Wan2.2-I2V-A14B/models_t5_umt5-xxl-enc-bf16.pth")
objective = dict(time_range=(0.9, 1.0))
condition_config = dict(i2v_head=1.0)
