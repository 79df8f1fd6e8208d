# TTT-Video with TTT-Linear from 3 to 63 seconds, each stage from the last one's weights. The same line again goes on
# where it stopped, and says how many processes the next stage wants; --stage NAME trains one.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/curriculum \
#       --dataset.data-path clips.parquet

exp_name = "ttt_linear"
stages = [
    dict(name="3s", run="3s.py"),
    dict(name="9s", run="9s.py"),
    dict(name="18s", run="18s.py"),
    dict(name="30s", run="30s.py"),
    dict(name="63s", run="63s.py"),
]
