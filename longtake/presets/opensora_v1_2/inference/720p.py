# Videos with Open-Sora 1.2, or with a training run's weights: 102 frames at 720p.
#   longtake generate opensora_v1_2/720p --prompt "rain on a pond"
_base_ = "240p.py"

sampling_option = dict(resolution="720p", num_frames=102)
