# Videos made anew from videos: `strength` says how far from them.
#   longtake generate cogvideox_fun/v2v --prompt "rain on a pond, at night" --ref pond.mp4
_base_ = "t2v.py"

strength = 0.7
