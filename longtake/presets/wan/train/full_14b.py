# All weights of Wan 2.1 T2V 14B at 480 x 832 and 81 frames, on eight GPUs of 80 GB.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc-per-node 8 -m longtake train wan/full_14b --dataset.data-path clips.parquet
#   longtake plan wan/full_14b --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     14.29 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 40 transformer blocks at auto: "full", 1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480p/81f  33,852      1     6.66   0.16  13.32  0.00      2.77      3.05   37.36       63.3  13.9     1
_base_ = "full_1_3b.py"

model = dict(from_pretrained="ckpts/Wan2.1-T2V-14B", num_layers=40, num_attention_heads=40, ffn_dim=13824)
ae = dict(from_pretrained="ckpts/Wan2.1-T2V-14B/Wan2.1_VAE.pth")
t5 = dict(from_pretrained="ckpts/Wan2.1-T2V-14B/models_t5_umt5-xxl-enc-bf16.pth")
lr = 1e-5
