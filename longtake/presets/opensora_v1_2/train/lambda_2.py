# The Lambda recipe, stage 2 of 7: as Open-Sora 1.2's, on OpenVid-1M.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_2 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_2 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "stage2.py"

model = dict(from_pretrained="outputs/lambda_1")
lr = 1.6e-4
warmup_steps = 400
optim = dict(weight_decay=0.01)
epochs = 5  # 7,099 steps
ckpt_every = 100
