# The run of `longtake demo --system opensora_v1_2`: a 5 M parameter STDiT3 learns the shapes by the rectified flow of
# Open-Sora 1.2, from their prompts and from frames of their own, by its masks.
#   longtake demo --system opensora_v1_2                              makes clips, trains, generates, judges, reports
#   longtake train demo/opensora_v1_2 --dataset.data-path clips.csv   trains alone
#
# Latents are frames, so that single ones can be given. A frame is one token: blocks over time, which meet the others at
# the same place alone, then see all of it. It has fewer numbers (8x8 pixels, 192) than the model is wide: a velocity is
# part noise, which has to pass through.
_base_ = "parts.py"

exp_name = "demo_opensora_v1_2"

dataset = dict(data_path="clips.parquet", cache_mb=256)

_frames = 4
_words = 64

bucket_config = {"8x8": {_frames: (1.0, 32)}}
condition_config = dict(identity=0.6, image_head=0.1, image_head_tail=0.05, random=0.25)

ae = dict(type="pixel", temporal=1, spatial=8, overlap=True)
t5 = dict(type="words", dim=_words, max_length=5)

model = dict(
    type="stdit3",
    in_channels=3 * 8 * 8,
    hidden_size=256,
    depth=2,
    num_heads=8,
    patch_size=(1, 1, 1),
    caption_channels=_words,
    model_max_length=5,
    input_sq_size=8,
    attention="math",
)

objective = dict(type="flow_1000", transform_scale=144.0)
dropout_ratio = dict(t5=0.1)

lr = 3e-3
optim = dict(lr=lr)

max_steps = 3000
slots_per_step = 1
ckpt_every = 1000

fps_save = 8
sampling_option = dict(resolution="8x8", aspect_ratio="1:1", num_frames=_frames, num_steps=20, guidance=1.5)
