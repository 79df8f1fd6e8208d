_base_ = "../../../longtake/presets/opensora_v2/train/stage1.py"
bucket_config = dict(_delete_=True, **{"256px": {1: (1.0, 4), 16: (1.0, 2)}})
ae = dict(_delete_=True, type="pixel", temporal=4, spatial=16)
t5 = dict(_delete_=True, type="words", dim=4096, max_length=512)
clip = dict(_delete_=True, type="words", dim=768, max_length=77)
model = dict(in_channels=3072, patch_size=1, depth=1, depth_single_blocks=2, grad_ckpt_settings=(1, 2))
