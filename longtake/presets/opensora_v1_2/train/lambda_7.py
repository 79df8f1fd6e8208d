# The Lambda recipe, stage 7 of 7: the same once more; it has no published file, and goes on from
# where stage 6 had crashed.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_7 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_7 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "lambda_6.py"

model = dict(from_pretrained="outputs/lambda_6")
epochs = 3
