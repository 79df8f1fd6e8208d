# The Lambda recipe, stage 1 of 7: as Open-Sora 1.2's, on OpenVid-1M, from PixArt-Sigma.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_1 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_1 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "stage1.py"

lr = 1.6e-4
warmup_steps = 400
optim = dict(weight_decay=0.01)
epochs = 5  # the published run ended at step 2,210
ckpt_every = 100
