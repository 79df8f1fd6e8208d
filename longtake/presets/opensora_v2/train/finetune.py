# Full fine-tuning of the released weights on your clips, on 8 GPUs of 80 GB: weights are gathered block by block, T5 is
# cut over the GPUs of the node.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/finetune \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v2/finetune --gpus 8 --gpu h100 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective" or "none",
#       1 micro-batch a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/113f   7,540      1     5.54   0.00  11.07  0.00      2.24      0.72   48.76       68.3  1.32    14
_base_ = "stage1_i2v.py"

_256px = {
    1: (1.0, 16),
    5: (1.0, 4), 9: (1.0, 4), 13: (1.0, 4), 17: (1.0, 4), 21: (1.0, 4), 25: (1.0, 4), 29: (1.0, 4), 33: (1.0, 4),
    37: (1.0, 2), 41: (1.0, 2), 45: (1.0, 2), 49: (1.0, 2), 53: (1.0, 2), 57: (1.0, 2), 61: (1.0, 2), 65: (1.0, 2),
    69: (1.0, 1), 73: (1.0, 1), 77: (1.0, 1), 81: (1.0, 1), 85: (1.0, 1), 89: (1.0, 1), 93: (1.0, 1), 97: (1.0, 1),
    101: (1.0, 1), 105: (1.0, 1), 109: (1.0, 1), 113: (1.0, 1),
    117: (1.0, 1), 121: (1.0, 1), 125: (1.0, 1), 129: (1.0, 1),
}  # fmt: skip
bucket_config = {"_delete_": True, "256px": _256px}

model = dict(
    from_pretrained="ckpts/Open_Sora_v2.safetensors",
    strict_load=True,
)
t5 = dict(placement="sharded")

lr = 1e-5
eps = 1e-8
warmup_steps = 100
ckpt_every = 500
keep_n_latest = 2
async_io = True
num_workers = 4
