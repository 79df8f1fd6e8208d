_base_ = "../../../longtake/presets/wan/train/lora_5b.py"
bucket_config = {"_delete_": True, "256px": {1: (1.0, 4), 16: (1.0, 2)}}
ae = dict(_delete_=True, type="pixel", temporal=1, spatial=8)
t5 = dict(_delete_=True, type="words", dim=4096, max_length=512)
model = dict(from_pretrained=None, num_layers=2, in_channels=192, out_channels=192)
