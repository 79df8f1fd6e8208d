# TTT-Video with TTT-Linear from 3 to 63 seconds, each stage from the last one's weights. The same line again goes on
# where it stopped, and says how many processes the next stage wants; --stage NAME trains one. Each has clips of its
# own length, with a caption for every 3 seconds.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nnodes 8 --nproc_per_node 8 -m longtake train ttt_video/ttt_linear/curriculum

exp_name = "ttt_linear"
stages = [
    dict(name="3s", run="3s.py", dataset=dict(data_path="clips_3s.parquet")),
    dict(name="9s", run="9s.py", dataset=dict(data_path="clips_9s.parquet")),
    dict(name="18s", run="18s.py", dataset=dict(data_path="clips_18s.parquet")),
    dict(name="30s", run="30s.py", dataset=dict(data_path="clips_30s.parquet")),
    dict(name="63s", run="63s.py", dataset=dict(data_path="clips_63s.parquet")),
]
