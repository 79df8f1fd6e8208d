# The Lambda recipe, stage 3 of 7: as Open-Sora 1.2's, on OpenVid-1M and MiraData.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_3 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_3 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
#     1.21 B parameters on 192 x h100, 73.6 GiB of 80 GiB each to be used
#     shard 192, zero 3, remat 28 spatial + 28 temporal blocks, budget auto keeps 0 to 0.67,
#       1.20 B of the parameters train, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#       2048/1f  16,384      5     0.02   0.00   0.05  0.02      9.20      0.12   44.62       54.0  4.49    21
#      1080p/1f   8,184      5     0.02   0.00   0.05  0.02      9.20      0.12   51.28       60.7  1.77    42
#      1024/51f  61,440      2     0.02   0.00   0.05  0.02      9.20      0.12   52.84       62.3  7.27     5
#       720p/1f   3,655     36     0.02   0.00   0.05  0.02      9.20      0.12   56.23       65.7  5.24    95
#     480p/204f  97,920      1     0.02   0.00   0.05  0.02      9.20      0.12   53.44       62.9  5.18     3
#      512/102f  30,720      4     0.02   0.00   0.05  0.02      9.20      0.12   52.84       62.3  6.59    11
#       360p/1f     925    141     0.02   0.00   0.05  0.02      9.20      0.12   56.42       65.8  5.15   365
#     240p/408f  50,400      2     0.02   0.00   0.05  0.02      9.20      0.12   55.24       64.7  5.04     6
#      256/408f  30,720      2     0.02   0.00   0.05  0.02      9.20      0.12   55.43       64.9  3.13    11
#     144p/102f   4,500     27     0.02   0.00   0.05  0.02      9.20      0.12   52.42       61.8  6.07    75
_base_ = "stage3.py"

exp_name = "lambda_3"
model = dict(from_pretrained="outputs/lambda_2")
lr = 2e-4
warmup_steps = 1000  # as its file had it; the page says 400
optim = dict(weight_decay=0.01)
epochs = 5  # 14,778 steps
ckpt_every = 100
