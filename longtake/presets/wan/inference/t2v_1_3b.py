# Videos with Wan 2.1 T2V 1.3B, or with a training run's adapters: five seconds at sixteen frames a second.
#   longtake generate wan/t2v_1_3b --prompt "rain on a pond"
_base_ = "../parts.py"

save_dir = "samples"
seed = 43
batch_size = 1
dtype = "bf16"
master_dtype = "bf16"  # nothing trains, so weights are kept as they are computed with

objective = dict(shift=8.0)  # as Wan's page has it for 1.3B
sampling_option = dict(
    resolution="480p",
    aspect_ratio="16:9",
    num_frames=81,  # 4k+1
    num_steps=50,
    guidance=6.0,
    solver="unipc",
)
fps_save = 16
