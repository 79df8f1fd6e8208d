# Wan 2.1 T2V 1.3B: denoiser, autoencoder, text encoder and objective. Not a run by itself: train/lora_1_3b.py and
# inference/t2v_1_3b.py have it as their base. Sizes that are not written are those of the folder of weights.

model = dict(type="wan", from_pretrained="ckpts/Wan2.1-T2V-1.3B")
ae = dict(type="wan", from_pretrained="ckpts/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth")
t5 = dict(type="umt5", from_pretrained="ckpts/Wan2.1-T2V-1.3B/models_t5_umt5-xxl-enc-bf16.pth", max_length=512)
objective = dict(type="shifted_flow", law="uniform", shift=5.0)
