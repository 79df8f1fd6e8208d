# Text to image to video at 768px. Under torchrun all GPUs make one image, then one video, together.
#   torchrun --nproc_per_node 8 -m longtake generate opensora_v2/t2i2v_768px \
#       --prompt "raining, sea"
_base_ = "t2i2v_256px.py"

sampling_option = dict(resolution="768px")
parallel = dict(shard=1, sequence="auto")
