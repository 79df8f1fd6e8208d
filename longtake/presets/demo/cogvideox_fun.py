# The run of `longtake demo --system cogvideox_fun`: a 5 M parameter CogVideoX learns the shapes by v-prediction, from
# their prompts and from a first frame. One colour is not shown to it.
#   longtake demo --system cogvideox_fun                              makes clips, trains, generates, judges, reports
#   longtake train demo/cogvideox_fun --dataset.data_path clips.csv   trains alone
#
# v is part noise, which has to pass through the model: a token has fewer numbers (4x4 pixels of all 4 frames, 192) than
# the model is wide. Latents are frames, so that the first can be given.
_base_ = "parts.py"

exp_name = "demo_cogvideox_fun"

dataset = dict(data_path="clips.parquet", cache_mb=256)

_frames = 4
_words = 64

bucket_config = {"16px": {_frames: (1.0, 32)}}
condition_config = dict(t2v=2, i2v_head=1)

ae = dict(type="pixel", temporal=1, spatial=4, overlap=True)
t5 = dict(type="words", dim=_words, max_length=6)

model = dict(
    type="cogvideox",
    visual="inpaint",
    init="zero_gate",
    num_layers=4,
    num_attention_heads=4,
    attention_head_dim=64,
    out_channels=3 * 4 * 4,
    text_embed_dim=_words,
    max_text_seq_length=6,
    time_embed_dim=128,
    patch_size=1,
    patch_size_t=_frames,
    use_rotary_positional_embeddings=True,
    use_learned_positional_embeddings=True,
    sample_height=4,
    sample_width=4,
    sample_frames=_frames,
    temporal_compression_ratio=1,
)

objective = dict(type="v_prediction", snr_shift=6.0)
dropout_ratio = dict(t5=0.1)

max_steps = 3200
slots_per_step = 1
ckpt_every = 800

fps_save = 4
sampling_option = dict(resolution="16px", aspect_ratio="1.00", num_frames=_frames, num_steps=20, guidance=3.0)
