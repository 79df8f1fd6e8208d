# The Lambda recipe, stage 7 of 7: the same once more; it has no published file, and goes on from
# where stage 6 had crashed.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_7 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_7 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "selective" or "full",
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.02   0.00   0.05  0.02      9.20      0.12   34.86       44.3  4.56    21
#      1080p/1f   8,184      5     0.02   0.00   0.05  0.02      9.20      0.12   17.42       26.8  1.85    42
#      1024/51f  61,440      2     0.02   0.00   0.05  0.02      9.20      0.12   52.79       62.2  7.27     5
#       720p/1f   3,655     36     0.02   0.00   0.05  0.02      9.20      0.12   56.11       65.5  5.25    95
#      480p/51f  24,480      5     0.02   0.00   0.05  0.02      9.20      0.12   52.60       62.0  6.59    14
#      512/204f  61,440      2     0.02   0.00   0.05  0.02      9.20      0.12   52.80       62.2  6.59     5
#       360p/1f     925    141     0.02   0.00   0.05  0.02      9.20      0.12   56.07       65.5  5.15   370
#       240p/1f     420    297     0.02   0.00   0.05  0.02      9.20      0.12   54.31       63.7  5.49   792
#        256/1f     256    297     0.02   0.00   0.05  0.02      9.20      0.12   33.60       43.0   3.9  1257
#     144p/102f   4,500     27     0.02   0.00   0.05  0.02      9.20      0.12   52.34       61.8  6.07    75
_base_ = "lambda_6.py"

exp_name = "lambda_7"
model = dict(from_pretrained="outputs/lambda_6")
epochs = 3  # as Lambda's page has it; where it ended is not published
