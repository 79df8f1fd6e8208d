# LoRA on CogVideoX-5B, on one GPU of 24 GB: the blocks' frozen weights in 8 bits.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   longtake train cogvideox_fun/lora_5b --dataset.data-path clips.parquet
#   longtake plan cogvideox_fun/lora_5b --gpus 1 --gpu 4090 --dataset.data-path clips.parquet
#     5.57 B parameters on 1 x 4090, 22.1 GiB of 24 GiB each to be used
#     zero 3, recomputed 42 transformer blocks at auto: "selective", 132.12 M of the parameters train,
#       1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     512px/49f  13,312      1     5.70   0.00   0.98  0.00      1.14      0.25    8.57       16.6  11.8     2
_base_ = "lora_2b.py"

model = dict(
    from_pretrained="ckpts/CogVideoX-5b/transformer",
    num_layers=42,
    num_attention_heads=48,
    use_rotary_positional_embeddings=True,
)
ae = dict(from_pretrained="ckpts/CogVideoX-5b/vae", scale_factor=0.7)
t5 = dict(from_pretrained="ckpts/CogVideoX-5b/text_encoder")
objective = dict(snr_shift=1.0)
lora = dict(base="int8")
