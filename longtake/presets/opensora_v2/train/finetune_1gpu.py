# Full fine-tuning on one GPU of 80 GB: bf16 weights with stochastic rounding, 8-bit moments and T5 in host memory.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train opensora_v2/finetune_1gpu --dataset.data-path clips.parquet
#   longtake plan opensora_v2/finetune_1gpu --gpus 1 --gpu h100 --dataset.data-path clips.parquet
#     11.89 B parameters on 1 x h100, 73.6 GiB of 80 GiB each to be used, and 22.5 GiB of the host's memory for each
#     zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1, bf16 masters, 8-bit moments,
#       moments in host memory, 8 micro-batches a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/129f   8,580      1    22.15  22.15   0.00  0.00      1.38      0.98   24.35       71.0  1.62     6
_base_ = "finetune.py"

_256px = {
    1: (1.0, 4),
    **{t: (1.0, 1) for t in range(5, 130, 4)},
}
accumulation_steps = 8

master_dtype = "bf16"
optim = dict(states="8bit", offload=True)
t5 = dict(placement="offloaded")
