# What the demos' runs have in common: small models, many short steps, on two CPU cores.
seed = 42
dtype = "bf16"
cpu_threads = 1  # its operations are too small for more; what runs beside it has the other core
parallel = dict(zero=2)  # weights this small stay gathered between forward and backward

lr = 2e-3
eps = 1e-8
optim = dict(lr=lr, eps=eps, betas=(0.9, 0.98), weight_decay=0.01)
warmup_steps = 50
decay_fraction = 0.4
final_lr_ratio = 0.02
grad_clip = 1.0
ema_decay = 0.995

num_workers = 1
prefetch_factor = 4
log_every = 100
keep_n_latest = 2
