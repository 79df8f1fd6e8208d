# Videos of 63 seconds with TTT-Video and TTT-Linear: 21 texts each, one for every 3 seconds.
#   longtake generate ttt_video/ttt_linear_63s --prompts story.json --model.from-pretrained outputs/ttt_linear_63s
_base_ = "ttt_linear_3s.py"

t5 = dict(max_length=458)
sampling_option = dict(num_frames=1009)
