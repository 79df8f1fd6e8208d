_base_ = "../../../longtake/presets/ttt_video/train/ttt_mlp/3s.py"
bucket_config = dict(_delete_=True, **{"256px": {17: (1.0, 1)}})
ae = dict(_delete_=True, type="pixel", temporal=1, spatial=16)
t5 = dict(_delete_=True, type="words", dim=4096, max_length=128)
model = dict(from_pretrained=None, segment_frames=8, num_layers=2, patch_size=1, out_channels=768)
parallel = dict(_delete_=True)
