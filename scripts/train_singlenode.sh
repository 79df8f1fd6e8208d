#!/bin/bash
# Trains TTT-Video on the GPUs of one machine. Values are set here, or in the environment:
#   CHECKPOINT_WEIGHTS_DIR=weights bash scripts/train_singlenode.sh --training.jsonl_paths clips.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."

DATE="${DATE:-$(date +"%m-%d")}"
NUM_GPUS="${NUM_GPUS:-8}"
CHECKPOINT_WEIGHTS_DIR="${CHECKPOINT_WEIGHTS_DIR:-}" # from 9 seconds on, the last checkpoint of the stage before
CONFIG_FILE="${CONFIG_FILE:-./configs/train/ttt-mlp/3s.toml}"
EXP_NAME="${EXP_NAME:-${DATE}-ttt-video-3s-BS64-5000steps}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

torchrun --nproc_per_node="${NUM_GPUS}" \
	--rdzv_backend c10d \
	--rdzv_endpoint="localhost:0" \
	--local-ranks-filter 0 \
	--role rank \
	--tee 3 \
	train.py \
	--wandb.disable \
	--job.config_file "${CONFIG_FILE}" \
	--job.exp_name="${EXP_NAME}" \
	--training.global_batch_size="${NUM_GPUS}" \
	--parallelism.dp_replicate=1 \
	--parallelism.dp_sharding="${NUM_GPUS}" \
	--parallelism.tp_sharding=1 \
	${CHECKPOINT_WEIGHTS_DIR:+--checkpoint.init_state_dir="${CHECKPOINT_WEIGHTS_DIR}"} \
	"$@"
