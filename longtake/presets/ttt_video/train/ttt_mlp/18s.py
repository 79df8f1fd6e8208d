# TTT-Video with TTT-MLP, 18s: clips of 289 frames in 6 segments, from the weights of 9s.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/18s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/18s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
_base_ = "../parts.py"

exp_name = "ttt_mlp_18s"
model = dict(from_pretrained="outputs/ttt_mlp_9s")
train_only = ("transformer_blocks.*.attn1", "transformer_blocks.*.ttt")

_segments = 6
t5 = dict(max_length=471)

_steps = 1000
_warmup = 50
