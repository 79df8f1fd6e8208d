# Open-Sora 2.0's training, and the root of its stages: every value that they share, and a table of buckets for stills.
# The values are the published ones. Weights go to ckpts/ (docs/opensora_v2.md).
# Assumes an online, uncompiled autoencoder: no stored latents (`dataset.latents`), no `ae.compile`.
#   torchrun --nproc_per_node 8 -m longtake train opensora_v2/image --dataset.data-path clips.parquet
#   longtake plan opensora_v2/image --gpus 8 --gpu h200 --dataset.data-path clips.parquet
#     11.89 B parameters on 8 x h200, 129.7 GiB of 141 GiB each to be used
#     shard 8, zero 3, recomputed 19 double + 38 single blocks at auto: "selective", 1 micro-batch a rank a step
#        bucket  tokens  batch  weights  grads  optim   ema  encoders  gathered  activ.  GiB a GPU     s  fits
#     1024px/1f   4,116      7     5.54   0.07  11.07  0.00      9.29      1.24   25.47       52.7  4.04    47
#      768px/1f   2,312     11     5.54   0.07  11.07  0.00      9.29      1.24   24.46       51.7  3.61    77
#      256px/1f     260     50     5.54   0.07  11.07  0.00      9.29      1.24   30.67       57.9  3.74   278
_base_ = "../parts.py"

dataset = dict(
    transform_name="resize_crop",
    fps_max=24,  # faster clips are read with a stride
    vmaf=True,  # the motion score goes into the caption
)
bucket_config = {
    "256px": {1: (1.0, 50)},
    "768px": {1: (0.5, 11)},
    "1024px": {1: (0.5, 7)},
}

model = dict(
    from_pretrained=None,
    strict_load=False,
    # published: the first 8 double blocks and all single ones, which save their inputs
    recompute="auto",  # all blocks, at the cheapest level that fits each entry of the table
)
ae = dict(sample_size="auto")  # published: tiles of 256, most of them overlapped twice, which take up to a third more
dropout_ratio = dict(t5=0.31622777, clip=0.31622777)  # both at once: 0.1

lr = 1e-5
eps = 1e-15
optim = dict(lr=lr, eps=eps, weight_decay=0.0)
warmup_steps = 0
grad_clip = 1.0
accumulation_steps = 1
ema_decay = None

dtype = "bf16"
compile = "auto"  # on a GPU that has a compiler
parallel = dict(zero=3)  # published: 2, which keeps weights gathered, in the room of outputs

num_workers = 12
prefetch_factor = 2
seed = 42
epochs = 1000
outputs = "outputs"
log_every = 10
ckpt_every = 100
keep_n_latest = 20
async_io = False
wandb_project = "mmdit"
