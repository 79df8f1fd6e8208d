# Videos of 256px with the released weights or with a training run's: text-to-video and, with a reference,
# image-to-video. Weights go to ckpts/ (docs/opensora_v2.md); every key and short flag: docs/generate.md.
#   longtake generate configs/opensora_v2/inference/256px.py --prompt "raining, sea"
#   longtake generate configs/opensora_v2/inference/256px.py --prompt "raining, sea" --cond-type i2v_head --ref sea.png
#   longtake generate configs/opensora_v2/inference/256px.py --prompts list.csv \
#       --model.from-pretrained "outputs/stage1_i2v/epoch*-global_step*"

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
    type="flux",
    from_pretrained="ckpts/Open_Sora_v2.safetensors",
    strict_load=True,
    guidance_embed=False,
    fused_qkv=False,
    use_liger_rope=True,
    cond_embed=True,
    grow_cond_in=True,  # text-to-video weights are taken too
    in_channels=64,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    mlp_ratio=4.0,
    num_heads=24,
    depth=19,
    depth_single_blocks=38,
    axes_dim=(16, 56, 56),
    theta=10_000,
    qkv_bias=True,
)
ae = dict(
    type="hunyuan_vae",
    from_pretrained="ckpts/hunyuan_vae.safetensors",
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    latent_channels=16,
    use_spatial_tiling=True,
    use_temporal_tiling=False,
)
t5 = dict(type="text_embedder", from_pretrained="google/t5-v1_1-xxl", max_length=512, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="openai/clip-vit-large-patch14", max_length=77)
