#!/usr/bin/env bash
# What to measure on one GPU, those parts first that decide what is built next; each part is one call of at most ten
# minutes and leaves its figures in benchmarks/results, or in $OUT where that is set. Every program writes its lines as
# they come and is ended at its limit: what is cut short leaves what it has, and the list takes 25 minutes at most.
#
#   benchmarks/gpu.sh            the parts, and the longest each may take
#   benchmarks/gpu.sh PART       one of them
#   TINY=1 benchmarks/gpu.sh PART      small, on a CPU, to see that it runs
#
# Nothing is installed but the wheels in .wheels, where there are some: pydantic, pydantic_core, annotated_types,
# typing_inspection and av, and diffusers for what encodes.
#
# The limits are forecasts, no GPU has run this: a program starts in 15 s; a line of `step` takes 17 s beside the
# compilation of its two kinds of block, 40 s each shape by itself and 60 s with sizes left open.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} failed=0
small=() step=(--no-peer --profile) each=(--seconds 0.4)
if [ -n "${TINY:-}" ]; then
  small=(--tiny --device cpu) each=()
  # traced, differentiated and cut as for a GPU, and run as it is; `dynamic` alone is compiled to the end, to C++
  step+=(--frames 1 --batch 2 --blocks 1 1 --compiled-step --backend aot_eager_decomp_partition)
elif compgen -G ".wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps .wheels/*.whl
fi

run() { # NAME SECONDS PROGRAM WORD...: one program, its figures in gpu_NAME.json; what fails does not stop the rest
  local name=$1 limit=$2 program=$3
  shift 3
  [ -z "${TINY:-}" ] || limit=600
  echo "== $name, $limit s at most: $program $*"
  timeout "$limit" "$python" "benchmarks/$program.py" "$@" ${small[@]+"${small[@]}"} --json "$out/gpu_$name.json"
  local code=$?
  [ $code -ne 124 ] || echo "== $name: ended after $limit s, with the lines that it had"
  [ $code -eq 0 ] || failed=1
}

blocks() { # NAME SECONDS WORD...: 2 + 4 blocks of full width at 8,960 tokens, three samples
  local full=(--frames 129 --batch 3 --blocks 2 4)
  [ -z "${TINY:-}" ] || full=()
  run "$1" "$2" step "${step[@]}" ${full[@]+"${full[@]}"} "${@:3}"
}

whole() { # NAME SECONDS WORD...: 4 + 8 such blocks
  local full=(--frames 129 --blocks 4 8)
  [ -z "${TINY:-}" ] || full=()
  run "$1" "$2" step "${step[@]}" ${full[@]+"${full[@]}"} "${@:3}"
}

# blocks computed again: all of them; what they keep, in turn: no block computed again, the inputs alone, all, a part
last=${TINY:+1 1} last=${last:-2 4} ends=${TINY:+1 1} ends=${ends:-4 8}
budgets="none inputs 1 0.23"
case "${1:-}" in
kernels) run kernels 140 kernels gemm attention ${each[@]+"${each[@]}"} ;;
fused) run fused 170 kernels fused ${each[@]+"${each[@]}"} ;;
encoders) run encoders 110 kernels vae t5 tiles ;;
static) blocks static 250 --static --remat $last --budget $budgets ;;
dynamic)
  if [ -n "${TINY:-}" ]; then
    blocks dynamic 600 --backend inductor --blocks 0 1 --remat 0 1 --budget 0.23
  else
    blocks dynamic 330 --remat $last --budget $budgets
  fi
  ;;
eager) blocks eager 100 --no-compiled-step --remat $last --budget $budgets ;;
steps) whole steps 190 --static --batch 1 2 3 ;;
sequence)
  size=(--side 768 --batch 2 --sequence 4)
  [ -z "${TINY:-}" ] || size=(--sequence 2)
  whole sequence 110 ${size[@]+"${size[@]}"} --static --remat $ends --budget 1
  ;;
online) blocks online 50 --no-compiled-step --latents online ;;
chain) run chain 50 kernels chain ;;
lora) blocks lora 110 --static --lora 16 ;;
mixers)
  small=(${TINY:+--tiny})
  run mixers 600 ttt
  ;;
*)
  echo "parts, the deciding ones first: kernels fused encoders static dynamic steps sequence online eager chain"
  echo "beside the list: lora mixers"
  [ -z "${1:-}" ] || failed=1
  ;;
esac
exit $failed
