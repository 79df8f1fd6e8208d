# The Lambda recipe, stage 5 of 7: the second table again.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_5 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_5 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "lambda_2.py"

model = dict(from_pretrained="outputs/lambda_4")
condition_config = None  # no frames are given any more
warmup_steps = None
optim = dict(schedule=[(0, 1.6e-5, "cosine"), (400, 6.4e-4, "cosine"), (800, 1.6e-4)])
epochs = 1  # stopped by hand at step 3,300, in its second pass of about 2,250
