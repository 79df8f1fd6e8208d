# All weights of Wan 2.1 T2V 1.3B at 480 x 832 and 81 frames, on one GPU of 80 GB.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train wan/full_1_3b --dataset.data-path clips.parquet
#   longtake plan wan/full_1_3b --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     1.42 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used
#     zero 3, recomputed 30 transformer blocks at auto: "selective", 1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480p/81f  33,852      1     5.29   0.00  10.57  0.00      2.77      0.16   15.74       34.5  3.15     5
_base_ = "lora_1_3b.py"

lora = None
model = dict(grad_ckpt_buffer_size=0)
lr = 2e-5
