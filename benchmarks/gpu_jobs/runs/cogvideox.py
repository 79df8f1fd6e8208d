_base_ = "../../../longtake/presets/cogvideox_fun/train/full_2b.py"
sizes = None
bucket_config = {"256px": {16: (1.0, 2)}}
condition_config = dict(t2v=1, inpaint=2)
ae = dict(_delete_=True, type="pixel", temporal=1, spatial=16)
t5 = dict(_delete_=True, type="words", dim=4096, max_length=226)
model = dict(from_pretrained=None, visual="inpaint", num_layers=2, patch_size=1, out_channels=768)
