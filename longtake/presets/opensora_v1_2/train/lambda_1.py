# The Lambda recipe, stage 1 of 7: as Open-Sora 1.2's, on OpenVid-1M, from PixArt-Sigma.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_1 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_1 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 2, remat 28 spatial + 28 temporal blocks, 1.20 B of the parameters train,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.02   0.00   0.05  0.02      9.20      0.00   20.63       29.9  4.26    20
#      1080p/1f   8,184      5     0.02   0.00   0.05  0.02      9.20      0.00   10.21       19.5  1.68    41
#       1024/1f   4,096     36     0.02   0.00   0.05  0.02      9.20      2.26   27.22       38.8  5.37    82
#       720p/1f   3,655     36     0.02   0.00   0.05  0.02      9.20      2.26   24.31       35.9  4.72    91
#       480p/1f   1,632     89     0.02   0.00   0.05  0.02      9.20      2.26   27.15       38.7   5.2   203
#        512/1f   1,024    141     0.02   0.00   0.05  0.02      9.20      2.26   27.33       38.9  5.49   320
#       360p/1f     925    141     0.02   0.00   0.05  0.02      9.20      2.26   24.78       36.3  5.02   353
#       240p/1f     420    297     0.02   0.00   0.05  0.02      9.20      2.26   24.76       36.3     6   744
#        256/1f     256    297     0.02   0.00   0.05  0.02      9.20      2.26   15.85       27.4   4.6  1162
#     144p/102f   4,500     27     0.02   0.00   0.05  0.02      9.20      2.26   22.95       34.5  4.39    72
_base_ = "stage1.py"

exp_name = "lambda_1"
lr = 1.6e-4
warmup_steps = 400
optim = dict(weight_decay=0.01)
epochs = 5  # the published run ended at step 2,210
ckpt_every = 100
