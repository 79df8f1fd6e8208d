_base_ = "../../../longtake/presets/opensora_v1_2/train/stage1.py"
bucket_config = dict(_delete_=True, **{"256": {1: (1.0, 4), 16: (1.0, 2)}})
ae = dict(_delete_=True, type="pixel", temporal=1, spatial=8)
t5 = dict(_delete_=True, type="words", dim=4096, max_length=300)
model = dict(from_pretrained=None, in_channels=192, depth=2, grad_ckpt_settings=(2, 2))
