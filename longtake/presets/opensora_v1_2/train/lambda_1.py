# The Lambda recipe, stage 1 of 7: as Open-Sora 1.2's, on OpenVid-1M, from PixArt-Sigma.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_1 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_1 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 3, recomputed 28 spatial + 28 temporal blocks at auto: "selective" or "full",
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.02   0.00   0.05  0.02      9.20      0.12   34.86       44.3  4.56    21
#      1080p/1f   8,184      5     0.02   0.00   0.05  0.02      9.20      0.12   17.42       26.8  1.85    42
#       1024/1f   4,096     36     0.02   0.00   0.05  0.02      9.20      0.12   27.09       36.5  6.21    85
#       720p/1f   3,655     36     0.02   0.00   0.05  0.02      9.20      0.12   56.11       65.5  5.25    95
#       480p/1f   1,632     89     0.02   0.00   0.05  0.02      9.20      0.12   26.91       36.3  5.71   212
#        512/1f   1,024    141     0.02   0.00   0.05  0.02      9.20      0.12   26.98       36.4  5.82   335
#       360p/1f     925    141     0.02   0.00   0.05  0.02      9.20      0.12   56.07       65.5  5.15   370
#       240p/1f     420    297     0.02   0.00   0.05  0.02      9.20      0.12   54.31       63.7  5.49   792
#        256/1f     256    297     0.02   0.00   0.05  0.02      9.20      0.12   33.60       43.0   3.9  1257
#     144p/102f   4,500     27     0.02   0.00   0.05  0.02      9.20      0.12   52.34       61.8  6.07    75
_base_ = "stage1.py"

exp_name = "lambda_1"
lr = 1.6e-4
warmup_steps = 400
optim = dict(weight_decay=0.01)
epochs = 5  # the published run ended at step 2,210
ckpt_every = 100
