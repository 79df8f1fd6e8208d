# TTT-Video with TTT-Linear, 9s: clips of 145 frames in 3 segments, from the weights of 3s.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/9s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_linear/9s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
_base_ = "../parts.py"

exp_name = "ttt_linear_9s"
model = dict(from_pretrained="outputs/ttt_linear_3s", mixer="ttt_linear", mini_batch_size=16, ttt_base_lr=1.0)
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 3
t5 = dict(max_length=502)
