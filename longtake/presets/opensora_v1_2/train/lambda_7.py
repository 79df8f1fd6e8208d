# The Lambda recipe, stage 7 of 7: the same once more; it has no published file, and goes on from
# where stage 6 had crashed.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_7 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_7 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 3, remat 28 spatial + 28 temporal blocks, budget auto keeps inputs to 1,
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket   tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f   16,384      5     0.02   0.00   0.05  0.02      9.20      0.12   58.24       67.7  4.46    21
#      1080p/1f    8,184      5     0.02   0.00   0.05  0.02      9.20      0.12   58.25       67.7  1.75    42
#      1024/51f   61,440      2     0.02   0.00   0.05  0.02      9.20      0.12   58.33       67.8  7.23     5
#     720p/102f  109,650      1     0.02   0.00   0.05  0.02      9.20      0.12   58.16       67.6  6.23     3
#       480p/1f    1,632     89     0.02   0.00   0.05  0.02      9.20      0.12   58.30       67.7  5.62   212
#      512/408f  122,880      1     0.02   0.00   0.05  0.02      9.20      0.12   58.33       67.8  6.55     2
#       360p/1f      925    141     0.02   0.00   0.05  0.02      9.20      0.12   58.31       67.7  5.13   370
#       240p/1f      420    297     0.02   0.00   0.05  0.02      9.20      0.12   58.33       67.8  5.46   792
#        256/1f      256    297     0.02   0.00   0.05  0.02      9.20      0.12   58.24       67.7   3.8  1257
#     144p/408f   18,000      6     0.02   0.00   0.05  0.02      9.20      0.12   58.27       67.7  5.25    19
_base_ = "lambda_6.py"

exp_name = "lambda_7"
model = dict(from_pretrained="outputs/lambda_6")
epochs = 3  # as Lambda's page says; where it ended is not told
