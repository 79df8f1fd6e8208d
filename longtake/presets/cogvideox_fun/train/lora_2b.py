# LoRA on CogVideoX-2B, on one GPU of 24 GB, with the numbers of CogVideoX-Fun's page.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train cogvideox_fun/lora_2b --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/lora_2b --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     1.69 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 30 transformer blocks at auto: "selective" or "none", 58.98 M of the parameters train,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     512px/25f   7,168      1     3.37   0.00   0.44  0.00      1.14      0.11   14.73       19.8  3.26    11
_base_ = "../parts.py"

sizes = dict(
    video_sample_size=512,
    image_sample_size=512,
    token_sample_size=512,
    video_sample_stride=3,
    video_sample_n_frames=49,
    enable_bucket=True,
    random_hw_adapt=True,
    training_with_video_token_length=True,
)

model = dict(recompute="auto")  # all blocks, at the cheapest level that fits
lora = dict(rank=64, alpha=32, targets=("to_q", "to_k", "to_v", "ff.0", "ff.2"))
t5 = dict(placement="offloaded")
dropout_ratio = dict(t5=0.1)

dtype = "bf16"
compile = "auto"  # on a GPU that has a compiler
seed = 42
lr = 1e-4
eps = 1e-10
optim = dict(weight_decay=3e-2)
grad_clip = 0.05
epochs = 100
ckpt_every = 50
keep_n_latest = 20
num_workers = 8
log_every = 10
fps_save = 8
