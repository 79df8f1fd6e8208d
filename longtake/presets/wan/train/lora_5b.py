# LoRA on Wan 2.2 TI2V-5B at 480 x 832 and 81 frames, on one GPU of 24 GB. Half of the clips have their first frame
# given.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train wan/lora_5b --dataset.data-path clips.parquet
#   longtake plan wan/lora_5b --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     5.00 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 30 transformer blocks at auto: "selective", 80.61 M of the parameters train,
#       1 micro-batch a rank a step
#       bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     480p/81f   8,568      1     9.61   0.00   0.60  0.00      2.95      0.15    7.65       21.0  7.86     1
_base_ = "lora_1_3b.py"

model = dict(
    from_pretrained="ckpts/Wan2.2-TI2V-5B",
    num_attention_heads=24,
    ffn_dim=14336,
    in_channels=48,
    out_channels=48,
    known_frames=True,
    grad_ckpt_buffer_size=0,
)
ae = dict(from_pretrained="ckpts/Wan2.2-TI2V-5B/Wan2.2_VAE.pth", version="2.2")
t5 = dict(from_pretrained="ckpts/Wan2.2-TI2V-5B/models_t5_umt5-xxl-enc-bf16.pth")
condition_config = dict(t2v=1.0, i2v_head=1.0)
fps_save = 24
