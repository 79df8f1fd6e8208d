# Videos of 768px. Under torchrun all GPUs make one video together.
#   longtake generate opensora_v2/768px --prompt "raining, sea"
#   torchrun --nproc_per_node 8 -m longtake generate opensora_v2/768px --prompt "raining, sea"
_base_ = "256px.py"

sampling_option = dict(resolution="768px")
parallel = dict(shard=1, sequence="auto")  # as many sequence peers as there are GPUs
