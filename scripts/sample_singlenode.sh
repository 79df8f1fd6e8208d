#!/bin/bash
#SBATCH --job-name=sample-ttt
#SBATCH --nodes=1
#SBATCH --gres=gpu:8
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:20:00
#SBATCH --output=slurm/slurm-%j.out
# Makes videos from storyboards with TTT-Video on the GPUs of one machine. Values are set here, or in the environment:
#   CHECKPOINT_WEIGHTS_DIR=exp/my-run bash scripts/sample_singlenode.sh
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

NUM_GPUS="${NUM_GPUS:-8}"
CHECKPOINT_WEIGHTS_DIR="${CHECKPOINT_WEIGHTS_DIR:?set it to the folder of a checkpoint}"
CONFIG_FILE="${CONFIG_FILE:-./configs/eval/ttt-mlp/9s.toml}"
INPUT_FILE="${INPUT_FILE:-./inputs/example-9s.json}"

torchrun --nproc_per_node="${NUM_GPUS}" \
	--rdzv_backend c10d \
	--rdzv_endpoint="localhost:0" \
	--local-ranks-filter 0 \
	--role rank \
	--tee 3 \
	sample.py \
	--job.config_file "${CONFIG_FILE}" \
	--eval.input_file="${INPUT_FILE}" \
	--checkpoint.init_state_dir="${CHECKPOINT_WEIGHTS_DIR}" \
	--parallelism.dp_replicate="${NUM_GPUS}" \
	--parallelism.dp_sharding=1 \
	--parallelism.tp_sharding=1 \
	--wandb.alert \
	--wandb.disable \
	"$@"
