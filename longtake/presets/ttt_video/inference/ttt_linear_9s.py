# Videos of 9 seconds with TTT-Video and TTT-Linear: 3 texts each, one for every 3 seconds.
#   longtake generate ttt_video/ttt_linear_9s --prompts story.json --model.from-pretrained outputs/ttt_linear_9s
_base_ = "ttt_linear_3s.py"

t5 = dict(max_length=502)
sampling_option = dict(num_frames=145)
