# The Lambda recipe, all seven stages: each starts from the weights of the one before as trained, not averaged, with a
# fresh optimizer, average and schedule, and its data from the beginning. The same line again goes on where it stopped;
# --stage NAME trains one. Stages 1 and 2 are of OpenVid-1M, the others of MiraData too.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda
#   longtake plan opensora_v1_2/lambda --gpus 192 --gpu h100 --stage stage1
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

exp_name = "lambda"
_few = dict(data_path="openvid.parquet")
_all = dict(data_path="openvid_miradata.parquet")
stages = [
    dict(name="stage1", run="lambda_1.py", dataset=_few),
    dict(name="stage2", run="lambda_2.py", dataset=_few),
    dict(name="stage3", run="lambda_3.py", dataset=_all),
    dict(name="stage4", run="lambda_4.py", dataset=_all),
    dict(name="stage5", run="lambda_5.py", dataset=_all),
    dict(name="stage6", run="lambda_6.py", dataset=_all),
    dict(name="stage7", run="lambda_7.py", dataset=_all),
]
