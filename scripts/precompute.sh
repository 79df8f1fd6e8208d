#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=4:30:00
#SBATCH --output=slurm/slurm-%j.out
# Encodes clips and their captions, a 3-second segment at a time, into a latent store; starts again where it stopped.
#   RUN=ttt_video/ttt_mlp/9s DATA=clips.jsonl STORE=latents bash scripts/precompute.sh
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

NUM_GPUS="${NUM_GPUS:-1}"
RUN="${RUN:-ttt_video/ttt_mlp/9s}"
DATA="${DATA:?set it to the table of clips}"
STORE="${STORE:?set it to the folder to write}"

torchrun --nproc_per_node="${NUM_GPUS}" -m longtake data encode "${RUN}" -o "${STORE}" --dataset.data_path "${DATA}" "$@"
