# Stage 2: text-to-video at 256px and 768px; 4 ranks share the tokens of a micro-batch.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage2 \
#       --dataset.data-path clips.parquet --model.from-pretrained outputs/stage1
#   longtake plan opensora_v2/stage2 --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 2, sequence 4, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1,
#       1 micro-batch a rank a step
#         bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     768px/129f  76,296      2     5.54   0.00  11.07  0.00      9.29      0.72   93.45      120.1  19.6    11
#       256px/1f     260    130     5.54   0.00  11.07  0.00      9.29      0.72   87.54      114.2  2.52  1089
_base_ = "image.py"

_256px = {
    1: (1.0, 130),
    **{t: (1.0, 14) for t in range(5, 34, 4)},
    **{t: (1.0, 10) for t in range(37, 66, 4)},
    **{t: (1.0, 7) for t in range(73, 98, 4)},  # 69 is missing in the published table
    **{t: (1.0, 6) for t in range(101, 130, 4)},
}
_768px = {
    1: (1.0, 38),
    **{t: (1.0, 6) for t in range(5, 34, 4)},
    **{t: (1.0, 4) for t in range(37, 66, 4)},
    **{t: (1.0, 3) for t in range(69, 98, 4)},
    **{t: (1.0, 2) for t in range(101, 130, 4)},
}
bucket_config = {"_delete_": True, "256px": _256px, "768px": _768px}

parallel = dict(tensor=1, sequence=4)

lr = 5e-5
ckpt_every = 200
