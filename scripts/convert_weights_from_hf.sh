#!/bin/bash
# Makes TTT-Video's first weights of those of CogVideoX-5B: a folder of it, or its name on the Hugging Face hub. Values
# are set here, or in the environment:
#   FINAL_SAVE_PATH=weights bash scripts/convert_weights_from_hf.sh
set -euo pipefail
cd "$(dirname "$0")/.."

FINAL_SAVE_PATH="${FINAL_SAVE_PATH:?set it to the folder to write}"
HUGGINGFACE_PRETRAINED_WEIGHTS_PATH="${HUGGINGFACE_PRETRAINED_WEIGHTS_PATH:-THUDM/CogVideoX-5b}"
SSM_TYPE="${SSM_TYPE:-ttt_mlp}" # ttt_linear or ttt_mlp

if [ -d "$FINAL_SAVE_PATH" ]; then
	echo "FINAL_SAVE_PATH = $FINAL_SAVE_PATH: is there already; give another folder, or remove it" >&2
	exit 1
fi

python -m longtake checkpoint convert "${HUGGINGFACE_PRETRAINED_WEIGHTS_PATH}" "${FINAL_SAVE_PATH}" \
	--model.type ttt_video \
	--model.mixer "${SSM_TYPE}" \
	"$@"
