# Videos of 9 seconds with TTT-Video and TTT-MLP: 3 texts each, one for every 3 seconds.
#   longtake generate ttt_video/ttt_mlp_9s --prompts story.json --model.from-pretrained outputs/ttt_mlp_9s
_base_ = "ttt_mlp_3s.py"

t5 = dict(max_length=502)
sampling_option = dict(num_frames=145)
