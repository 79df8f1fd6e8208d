# The Lambda recipe, stage 1 of 7: as Open-Sora 1.2's, on OpenVid-1M, from PixArt-Sigma.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_1 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_1 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 3, remat 28 spatial + 28 temporal blocks, budget auto keeps 0 to 0.67,
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.02   0.00   0.05  0.02      9.20      0.12   44.62       54.0  4.49    21
#      1080p/1f   8,184      5     0.02   0.00   0.05  0.02      9.20      0.12   51.28       60.7  1.77    42
#       1024/1f   4,096     36     0.02   0.00   0.05  0.02      9.20      0.12   27.22       36.6   6.2    84
#       720p/1f   3,655     36     0.02   0.00   0.05  0.02      9.20      0.12   56.23       65.7  5.24    95
#       480p/1f   1,632     89     0.02   0.00   0.05  0.02      9.20      0.12   27.15       36.6   5.7   210
#        512/1f   1,024    141     0.02   0.00   0.05  0.02      9.20      0.12   27.33       36.8  5.82   331
#       360p/1f     925    141     0.02   0.00   0.05  0.02      9.20      0.12   56.42       65.8  5.15   365
#     240p/408f  50,400      2     0.02   0.00   0.05  0.02      9.20      0.12   55.24       64.7  5.04     6
#      256/408f  30,720      2     0.02   0.00   0.05  0.02      9.20      0.12   55.43       64.9  3.13    11
#     144p/102f   4,500     27     0.02   0.00   0.05  0.02      9.20      0.12   52.42       61.8  6.07    75
_base_ = "stage1.py"

exp_name = "lambda_1"
lr = 1.6e-4
warmup_steps = 400
optim = dict(weight_decay=0.01)
epochs = 5  # the published run ended at step 2,210
ckpt_every = 100
