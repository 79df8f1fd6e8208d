# TTT-Video with TTT-MLP, 9s: clips of 145 frames in 3 segments, from the weights of 3s.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/9s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/9s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
_base_ = "../parts.py"

exp_name = "ttt_mlp_9s"
model = dict(from_pretrained="outputs/ttt_mlp_3s")
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 3
t5 = dict(max_length=502)
