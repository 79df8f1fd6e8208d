# The Lambda recipe, stage 4 of 7: the first table again, without masks, with a bump of the rate.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_4 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_4 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "lambda_1.py"

model = dict(from_pretrained="outputs/lambda_3", strict_load=True)
condition_config = None  # no frames are given any more
warmup_steps = None
optim = dict(schedule=[(0, 1.6e-5, "cosine"), (400, 6.4e-4, "cosine"), (800, 1.6e-4)])
epochs = 3  # stopped by hand at step 2,100, in its fourth pass of about 600
