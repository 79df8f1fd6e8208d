# Videos made anew from videos, with CogVideoX-Fun-5B-InP: `strength` says how far from them, `mask` where.
#   longtake generate cogvideox_fun/v2v --prompt "rain on a pond, at night" --ref pond.mp4
#   longtake generate cogvideox_fun/v2v --prompt "a heron" --ref pond.mp4 --mask bank.png --cond-type inpaint
_base_ = "i2v.py"

cond_type = "t2v"
strength = 0.7
