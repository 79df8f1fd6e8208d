#!/bin/bash
# Trains TTT-Video on many nodes under Slurm; the job starts again by itself before its time is over, and goes on where
# it stopped. Values are set here, or in the environment:
#   SLURM_ACCOUNT=mine SLURM_PARTITION=gpu bash scripts/train_submitit.sh --training.jsonl_paths clips.jsonl
# Without a login to Weights & Biases, which is looked for before the job is submitted, add --wandb.disable.
set -euo pipefail

CODE_PATH="${CODE_PATH:-$(cd "$(dirname "$0")/.." && pwd)}"
cd "${CODE_PATH}"
DUMP_FOLDER="${DUMP_FOLDER:-$CODE_PATH/experiments/3sec}"

NUM_NODES="${NUM_NODES:-8}"
TIMEOUT_MINUTES="${TIMEOUT_MINUTES:-240}"
SLURM_ACCOUNT="${SLURM_ACCOUNT:-default}"
SLURM_PARTITION="${SLURM_PARTITION:-default}"
CHECKPOINT_WEIGHTS_DIR="${CHECKPOINT_WEIGHTS_DIR:-}"
CONFIG_FILE="${CONFIG_FILE:-./configs/train/ttt-mlp/3s.toml}"
EXP_NAME="${EXP_NAME:-${DATE:+${DATE}-}ttt-video-3s-BS64-5000steps}" # the same name resumes, also on another day
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

submitted=$(python train_submitit.py \
	--nodes="${NUM_NODES}" \
	--partition="${SLURM_PARTITION}" \
	--account="${SLURM_ACCOUNT}" \
	--timeout="${TIMEOUT_MINUTES}" \
	--checkpoint.timeout_minutes="${TIMEOUT_MINUTES}" \
	--job.config_file "${CONFIG_FILE}" \
	--job.exp_name="${EXP_NAME}" \
	--job.dump_folder="${DUMP_FOLDER}" \
	--checkpoint.resume \
	--checkpoint.resume_step=-1 \
	${CHECKPOINT_WEIGHTS_DIR:+--checkpoint.init_state_dir="${CHECKPOINT_WEIGHTS_DIR}"} \
	"$@")
echo "${submitted}"
echo "Job id: $(grep "Submitted job_id:" <<<"${submitted}" | awk '{print $3}')"
