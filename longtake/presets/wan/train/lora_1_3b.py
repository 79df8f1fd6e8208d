# LoRA on Wan 2.1 T2V 1.3B at 480 x 832 and 81 frames, on one GPU of 12 GB and 8 GiB of pinned host memory.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train wan/lora_1_3b --dataset.data-path clips.parquet
#   longtake plan wan/lora_1_3b --gpus 1 --gpu 3060 --dataset.data-path clips.parquet
#     1.42 B parameters on 1 x 3060, 11.0 GiB of 12 GiB each to be used, and 8.0 GiB of the host's memory for each
#     zero 3, recomputed 30 transformer blocks at auto: "full", what these save in 8.0 GiB of host memory,
#       43.75 M of the parameters train, 1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU    s  fits
#     480p/81f  33,852      1     2.81   0.00   0.33  0.00      2.77      0.08    4.44       10.4  116     1
_base_ = "../parts.py"

bucket_config = {"480p": {81: (1.0, 1)}}  # 5 s at 16 frames a second

model = dict(recompute="auto", grad_ckpt_buffer_size=8 * 2**30)  # block inputs wait in host memory
lora = dict(rank=32, alpha=32)
t5 = dict(placement="offloaded")
dropout_ratio = dict(t5=0.1)

dtype = "bf16"
compile = "auto"  # on a GPU that has a compiler
seed = 42
lr = 1e-4
optim = dict(weight_decay=1e-2)
grad_clip = 1.0
ema_decay = None
epochs = 100
ckpt_every = 250
keep_n_latest = 10
num_workers = 4
log_every = 10
fps_save = 16
