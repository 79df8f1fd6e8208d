# Videos of 30 seconds with TTT-Video and TTT-Linear: 10 texts each, one for every 3 seconds.
#   longtake generate ttt_video/ttt_linear_30s --prompts story.json --model.from-pretrained outputs/ttt_linear_30s
_base_ = "ttt_linear_3s.py"

t5 = dict(max_length=497)
sampling_option = dict(num_frames=481)
