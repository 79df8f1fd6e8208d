# Stage 2 with known frames: text-to-video and image-to-video at 256px and 768px.
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/stage2_i2v \
#       --dataset.data-path clips.parquet --model.from-pretrained outputs/stage1_i2v
#   longtake plan opensora_v2/stage2_i2v --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used, and 50.0 GiB of the host's memory for each
#     shard 2, sequence 4, zero 3, remat 19 double + 38 single blocks, budget auto keeps 0.6 to 1,
#       inputs of recomputed blocks and what they keep in 50.0 GiB of host memory, 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     768px/57f  34,680      5     5.54   0.00  11.07  0.00      9.29      0.72   93.64      120.3  13.9    36
#     256px/93f   6,240     28     5.54   0.00  11.07  0.00      9.29      0.72   93.64      120.3  8.98   191
_base_ = "stage2.py"

_256px = {
    1: (1.0, 195),
    **{t: (1.0, 80) for t in range(5, 34, 4)},
    **{t: (1.0, 40) for t in range(37, 66, 4)},
    **{t: (1.0, 28) for t in range(69, 98, 4)},
    **{t: (1.0, 23) for t in range(101, 130, 4)},
}
_768px = {
    1: (0.5, 38),
    **{t: (0.5, 10) for t in range(5, 34, 4)},
    **{t: (0.5, 5) for t in range(37, 66, 4)},
    **{t: (0.5, 3) for t in range(69, 98, 4)},
    **{t: (0.5, 2) for t in range(101, 130, 4)},
}
bucket_config = {"_delete_": True, "256px": _256px, "768px": _768px}

model = dict(
    cond_embed=True,
    grow_cond_in=True,  # a text-to-video model starts with an entrance of zeros for known frames
    grad_ckpt_buffer_size=2 * 25 * 2**30,  # bytes; the published 25 * 2**30 are elements of two bytes
)
condition_config = dict(t2v=1, i2v_head=5, i2v_loop=1, i2v_tail=1)
