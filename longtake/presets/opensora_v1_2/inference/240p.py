# Videos with Open-Sora 1.2, or with a training run's weights: 51 frames at 240p. A motion of the camera, or scores, go
# into the prompt by --caption-facts.camera-motion "pan left"; given frames by --cond-type image_head --ref a.png, or by
# a mask strategy in its place.
#   longtake generate opensora_v1_2/240p --prompt "rain on a pond"
_base_ = "../parts.py"

model = dict(from_pretrained="hpcai-tech/OpenSora-STDiT-v3")

save_dir = "samples"
seed = 42
batch_size = 1
dtype = "bf16"
master_dtype = "bf16"  # nothing trains, so weights are kept as they are computed with

sampling_option = dict(
    resolution="240p",
    aspect_ratio="9:16",  # height to width
    num_frames=51,
    num_steps=30,
    guidance=7.0,
)
caption_facts = dict(aes="6.5")
fps_save = 24
