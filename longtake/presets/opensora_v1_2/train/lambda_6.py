# The Lambda recipe, stage 6 of 7: the third table again, with half the bump.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda_6 \
#       --dataset.data-path clips.parquet
#   longtake plan opensora_v1_2/lambda_6 --gpus 192 --gpu h100 --dataset.data-path clips.parquet
_base_ = "lambda_3.py"

model = dict(from_pretrained="outputs/lambda_5")
condition_config = None  # no frames are given any more
warmup_steps = None
optim = dict(schedule=[(0, 1.6e-5, "cosine"), (400, 3.2e-4, "cosine"), (800, 0.8e-4)])
epochs = 1  # crashed at step 2,900 of about 2,956
