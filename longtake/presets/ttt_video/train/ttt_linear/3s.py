# TTT-Video with TTT-Linear, 3s: clips of 49 frames in 1 segment, from CogVideoX-5B.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/3s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_linear/3s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
_base_ = "../parts.py"

exp_name = "ttt_linear_3s"
model = dict(mixer="ttt_linear", mini_batch_size=16, ttt_base_lr=1.0)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

t5 = dict(max_length=498)

_lr_ttt = 1e-4
