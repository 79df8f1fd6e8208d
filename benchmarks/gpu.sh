#!/usr/bin/env bash
# What to measure on one GPU, those parts first that decide what is built next; each part is one call of at most ten
# minutes and leaves its figures in benchmarks/results, or in $OUT where that is set.
#
#   benchmarks/gpu.sh            the parts
#   benchmarks/gpu.sh PART       one of them
#   TINY=1 benchmarks/gpu.sh PART      small, on a CPU, to see that it runs
#
# Nothing is installed but the wheels in .wheels, where there are some: pydantic, pydantic_core, annotated_types,
# typing_inspection and av, and diffusers for what encodes.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} failed=0
small=() step=(--no-peer --profile)
if [ -n "${TINY:-}" ]; then
  small=(--tiny --device cpu)
  step=(--no-peer --no-compiled-step --frames 1)
elif compgen -G ".wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps .wheels/*.whl
fi

run() { # NAME PROGRAM WORD...: one program, its figures in gpu_NAME.json; what fails does not stop the rest
  local name=$1 program=$2
  shift 2
  echo "== $name: $program $*"
  "$python" "benchmarks/$program.py" "$@" ${small[@]+"${small[@]}"} --json "$out/gpu_$name.json" || failed=1
}

blocks() { # NAME WORD...: 2 + 4 blocks of full width at 8,960 tokens, three samples
  local name=$1
  shift
  if [ -n "${TINY:-}" ]; then
    run "blocks_$name" step "$@" "${step[@]}"
  else
    run "blocks_$name" step --frames 129 --batch 3 --seconds 5 --blocks 2 4 "$@" "${step[@]}"
  fi
}

last=${TINY:+1 2} last=${last:-2 4} # blocks computed again: all of them
case "${1:-}" in
kernels) run kernels kernels gemm attention ;;
fused) run fused kernels fused ;;
encoders) run encoders kernels vae t5 ;;
compiled)
  blocks dynamic_none
  blocks static_none --static
  blocks static_attention --static --remat $last --budget 0.23
  blocks static_all --static --remat $last --budget 1
  blocks static_full --static --remat $last
  ;;
eager)
  blocks eager_none --no-compiled-step
  blocks eager_attention --no-compiled-step --remat $last --budget 0.23
  blocks eager_all --no-compiled-step --remat $last --budget 1
  blocks eager_full --no-compiled-step --remat $last
  ;;
steps)
  if [ -n "${TINY:-}" ]; then
    run steps_1 step "${step[@]}"
  else
    for batch in 1 2 3; do
      run "steps_$batch" step --blocks 4 8 --frames 129 --batch "$batch" --static "${step[@]}"
    done
  fi
  ;;
sequence)
  if [ -n "${TINY:-}" ]; then
    run sequence step --sequence 2 "${step[@]}"
  else
    run sequence step --blocks 4 8 --frames 129 --side 768 --batch 2 --sequence 4 --static --remat 4 8 --budget 1 "${step[@]}"
  fi
  ;;
online)
  blocks stored --latents stored
  blocks online --latents online
  ;;
lora) blocks lora --lora 16 ;;
ttt)
  small=(${TINY:+--tiny})
  run ttt ttt
  ;;
*)
  echo "parts, the deciding ones first: kernels fused encoders compiled steps sequence online eager lora ttt"
  [ -z "${1:-}" ] || failed=1
  ;;
esac
exit $failed
