# Adapters on the colour that demo/cogvideox_fun is not shown. Clips of other colours are trained on too, lest the model
# forget them.
#   longtake train demo/cogvideox_fun_lora --model.from_pretrained outputs/demo_cogvideox_fun/run
_base_ = "cogvideox_fun.py"

exp_name = "demo_cogvideox_fun_lora"
dataset = dict(data_path=None, mix=[("held_back.parquet", 1.0), ("seen.parquet", 0.1)])

lora = dict(rank=16, alpha=16)
lr = 2e-3
optim = dict(lr=lr)
warmup_steps = 20
max_steps = 200
ckpt_every = 0
