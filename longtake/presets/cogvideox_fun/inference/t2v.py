# Videos with CogVideoX-2B, or with a training run's weights or adapters: six seconds at eight frames a second.
#   longtake generate cogvideox_fun/t2v --prompt "rain on a pond"
_base_ = "../parts.py"

save_dir = "samples"
seed = 43
batch_size = 1
dtype = "bf16"
master_dtype = "bf16"  # nothing trains, so weights are kept as they are computed with

sampling_option = dict(
    resolution="512px",
    aspect_ratio="0.57",  # height to width, of CogVideoX-Fun's table: 384 x 672
    num_frames=49,  # 4k+1
    num_steps=50,
    guidance=6.0,
    solver="ddim",
)
fps_save = 8
