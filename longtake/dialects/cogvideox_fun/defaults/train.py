# What train.py of CogVideoX-Fun takes where a flag is not given, beside what all three do.
_base_ = "shared.py"

train_mode = "normal"
abnormal_norm_clip_start = 1000
initial_grad_norm_ratio = 5
