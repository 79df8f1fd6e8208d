# The Lambda recipe, stage 3 of 7: as Open-Sora 1.2's, on OpenVid-1M and MiraData.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_3 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_3 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "stage3.py"

model = dict(from_pretrained="outputs/lambda_2")
lr = 2e-4
warmup_steps = 1000  # as its file had it; the page says 400
optim = dict(weight_decay=0.01)
epochs = 5  # 14,778 steps
ckpt_every = 100
