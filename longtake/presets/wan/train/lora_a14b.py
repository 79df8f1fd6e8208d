# LoRA on both experts of Wan 2.2 T2V-A14B in one run, at 480 x 832 and 33 frames, on one GPU of 48 GB and 8 GiB of
# pinned host memory: the blocks' frozen weights in 8 bits. Each step trains one expert.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train wan/lora_a14b --dataset.data-path clips.parquet
#   longtake plan wan/lora_a14b --gpus 1 --gpu l40s --dataset.data-path clips.parquet
#     28.58 B parameters on 1 x l40s, 44.2 GiB of 48 GiB each to be used, and 8.0 GiB of the host's memory for each
#     zero 3, recomputed 40 transformer blocks at auto: "full", what these save in 8.0 GiB of host memory,
#       306.71 M of the parameters train, 2 denoisers, one a step, 1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480p/33f  14,508      1    28.21   0.00   2.29  0.00      2.77      0.29    7.35       40.9  9.61     1
_base_ = "lora_a14b_high.py"

low_noise = dict(from_pretrained="ckpts/Wan2.2-T2V-A14B/low_noise_model", boundary=0.875)
objective = dict(time_range=(0.0, 1.0))
lora = dict(base="int8")
