# What train_lora.py of CogVideoX-Fun takes where a flag is not given, beside what all three do.
_base_ = "shared.py"

train_mode = "normal"
rank = 128
network_alpha = 64
