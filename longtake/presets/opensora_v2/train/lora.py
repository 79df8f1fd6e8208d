# LoRA on the released weights, on one GPU of 80 GB.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/lora --dataset.data-path clips.parquet
#   longtake plan opensora_v2/lora --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used
#     zero 3, remat 19 double + 38 single blocks, budget auto keeps 1, 63.50 M of the parameters train,
#       4 micro-batches a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/65f   4,420      2    22.39   0.24   0.47  0.24      9.29      0.12   33.35       66.1  1.29    17
_base_ = "finetune.py"

_256px = {
    1: (1.0, 8),
    **{t: (1.0, 2) for t in range(5, 66, 4)},
    **{t: (1.0, 1) for t in range(69, 130, 4)},
}
accumulation_steps = 4

lora = dict(rank=16, alpha=16)
t5 = dict(placement="resident")

lr = 1e-4
ema_decay = 0.99
