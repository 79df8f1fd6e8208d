# The run of `longtake demo --system ttt_video`: a small TTT-Video learns stories of moving shapes, one scene first and
# then three, each with a caption of its own. The first stage has no mixer, as CogVideoX has none: a single segment has
# nothing to hear of.
#   longtake demo --system ttt_video                             makes clips, trains, generates, judges, reports
#   longtake train demo/ttt_video --stage scene --dataset.data_path clips.csv   trains the first stage alone
#
# A token has fewer numbers (4x4 pixels of 2 frames, 96) than the model is wide: v is part noise, which has to pass
# through it. With 2 blocks nothing of the first scene gets to the third by frames that neighbours share: that takes 3.
_base_ = "parts.py"

exp_name = "demo_ttt_video"

dataset = dict(data_path="clips.parquet", cache_mb=256)

_words = 64

bucket_config = {"8px": {14: (1.0, 32)}}

ae = dict(type="pixel", temporal=2, spatial=4, overlap=True)
t5 = dict(type="words", dim=_words, max_length=5)

model = dict(
    type="ttt_video",
    mixer="ttt_linear",
    directions="parallel",
    mini_batch_size=16,
    init="zero_gate",
    num_layers=2,
    num_attention_heads=4,
    attention_head_dim=32,
    out_channels=3 * 2 * 4 * 4,
    text_embed_dim=_words,
    time_embed_dim=128,
    patch_size=1,
    segment_frames=2,
)

objective = dict(type="v_prediction", snr_shift=6.0)
dropout_ratio = dict(t5=0.1)

slots_per_step = 1
ckpt_every = 400

fps_save = 4
sampling_option = dict(
    resolution="8px",
    aspect_ratio="1:1",
    num_frames=14,
    num_steps=20,
    solver="ddim",
    guidance=3.0,
    guidance_rule=None,
)

stages = [
    dict(
        name="scene",
        bucket_config={"8px": {"_delete_": True, 6: (1.0, 32)}},
        sampling_option=dict(num_frames=6),
        model=dict(mixer="none"),
        max_steps=2000,
    ),
    dict(name="story", max_steps=900),
]
