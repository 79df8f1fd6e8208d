# TTT-Video with TTT-MLP, 3s: clips of 49 frames in 1 segment, from CogVideoX-5B.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_mlp/3s \
#       --dataset.data-path clips.parquet
#   longtake plan ttt_video/ttt_mlp/3s --gpus 64 --gpu h100 --dataset.data-path clips.parquet
_base_ = "../parts.py"

exp_name = "ttt_mlp_3s"

t5 = dict(max_length=498)

_lr_ttt = 1e-4
