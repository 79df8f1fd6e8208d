# What all stages of Open-Sora 1.2's training have in common. Not a run by itself.
_base_ = "../parts.py"

model = dict(
    recompute="auto",  # all blocks, at the cheapest level that fits each entry of the table
    from_part="model",  # stages go on from weights as trained
)
freeze = ("y_embedder",)
dropout_ratio = dict(t5=0.1)

dtype = "bf16"
compile = "auto"  # on a GPU that has a compiler
parallel = dict(zero=3)
lr = 1e-4
initial_lr = 0.0
eps = 1e-15
grad_clip = 1.0
ema_decay = 0.99

seed = 42
epochs = 1000
num_workers = 8
log_every = 10
ckpt_every = 200
