# Videos of 256px with the released weights or with a training run's: text-to-video and, with a reference,
# image-to-video. Weights go to ckpts/ (docs/opensora_v2.md); every key and short flag: docs/generate.md.
#   longtake generate opensora_v2/256px --prompt "raining, sea"
#   longtake generate opensora_v2/256px --prompt "raining, sea" --cond-type i2v_head --ref sea.png
#   longtake generate opensora_v2/256px --prompts list.csv \
#       --model.from-pretrained "outputs/stage1_i2v/epoch*-global_step*"
_base_ = "../parts.py"

save_dir = "samples"
seed = 42
batch_size = 1
dtype = "bf16"
master_dtype = "bf16"  # nothing trains, so weights are kept as they are computed with
cond_type = "t2v"

sampling_option = dict(
    resolution="256px",
    aspect_ratio="16:9",  # 9:16, 1:1, 2.39:1 ...
    num_frames=129,  # 4k+1
    num_steps=50,
    shift=True,
    guidance=7.5,
    guidance_img=3.0,
    text_osci=True,
    image_osci=True,
    scale_temporal_osci=True,
    method="i2v",
    seed=None,  # of the first video; None is `seed` above
)
motion_score = 4
fps_save = 24

model = dict(
    from_pretrained="ckpts/Open_Sora_v2.safetensors",
    strict_load=True,
    cond_embed=True,
    grow_cond_in=True,  # text-to-video weights are taken too
)
