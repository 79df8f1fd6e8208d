# Videos of 3 seconds with TTT-Video and TTT-MLP: 1 text each, one for every 3 seconds.
#   longtake generate ttt_video/ttt_mlp_3s --prompts story.json --model.from-pretrained outputs/ttt_mlp_3s
_base_ = "../parts.py"

save_dir = "samples"
seed = 42
batch_size = 1
dtype = "bf16"
master_dtype = "bf16"  # nothing trains, so weights are kept as they are computed with
