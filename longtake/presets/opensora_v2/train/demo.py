# A look at training with few shapes: 256px, one clip in a micro-batch.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/demo --dataset.data-path clips.parquet
#   longtake plan opensora_v2/demo --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "none", 1 micro-batch a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     256px/129f   8,580      1     5.54   0.00  11.07  0.00      9.29      0.72   55.05       81.7  1.49    24
_base_ = "stage1.py"

bucket_config = {
    "_delete_": True,
    "256px": {
        1: (1.0, 1),
        33: (1.0, 1),
        97: (1.0, 1),
        129: (1.0, 1),
    },
}
