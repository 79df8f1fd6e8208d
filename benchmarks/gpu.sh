#!/usr/bin/env bash
# What to measure on one GPU, those parts first that decide what is built next; each part is one call of at most ten
# minutes and leaves its figures in benchmarks/results, or in $OUT where that is set. Every program writes its lines as
# they come and is ended at its limit: what is cut short leaves what it has, and the list takes 25 minutes at most.
#
#   benchmarks/gpu.sh                   the parts, and the longest each may take
#   benchmarks/gpu.sh PART...           these, in turn
#   TINY=1 benchmarks/gpu.sh PART...    small, on a CPU, to see that they run
#
# With a quarter of an hour in all: `tests` and `fused` first, then `static` and `sequence`, then `kernels`.
#
# Nothing is installed but the wheels in .wheels, where there are some: pydantic, pydantic_core, annotated_types,
# typing_inspection and av, and diffusers for what encodes. Where pip reaches an index, for a machine with Python 3.12:
#
#   pip download -d .wheels --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux2014_x86_64 av diffusers annotated_types typing_inspection pydantic \
#     pydantic_core==THE_VERSION_THAT_PYDANTIC_ASKS_FOR
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
part() { # NAME
  case "$1" in
  kernels) run kernels 140 kernels gemm attention ${each[@]+"${each[@]}"} ;;
  fused) run fused 170 kernels fused ${each[@]+"${each[@]}"} ;;
  encoders) run encoders 120 kernels t5 tiles vae ;;
  static) blocks static 270 --static --remat $last --budget $budgets ;;
  dynamic)
    if [ -n "${TINY:-}" ]; then
      blocks dynamic 600 --backend inductor --blocks 0 1 --remat 0 1 --budget 0.23
    else
      blocks dynamic 190 --remat $last --budget 1 0.23
    fi
    ;;
  eager) blocks eager 100 --no-compiled-step --remat $last --budget $budgets ;;
  steps) whole steps 190 --static --batch 1 2 3 ;;
  sequence)
    local size=(--side 768 --batch 2 --sequence 4 --repeats 3 --warmup 1)
    [ -z "${TINY:-}" ] || size=(--sequence 2)
    whole sequence 160 ${size[@]+"${size[@]}"} --static --remat $ends --budget 1
    ;;
  online) blocks online 100 --no-compiled-step --latents online --repeats 3 --seconds 5 ;;
  chain) run chain 50 kernels chain ;;
  lora) blocks lora 110 --static --lora 16 ;;
  reductions) blocks reductions 110 --static --remat $last --budget 1 --autotune-reductions ;; # beside that line of `static`
  mixers)
    local small=(${TINY:+--tiny})
    run mixers 600 ttt
    ;;
  tests) # what needs a CUDA device among the tests
    echo "== tests, 300 s at most: pytest -m gpu"
    local files
    files=$(grep -rl --include="test_*.py" pytest.mark.gpu tests) # others may ask for packages that are not there
    timeout 300 "$python" -m pytest -q -m gpu -p no:cacheprovider ${TINY:+--collect-only} $files || failed=1
    ;;
  *)
    echo "no part $1; there are:"
    list
    failed=1
    ;;
  esac
}

list() {
  echo "parts, the deciding ones first: kernels fused encoders static dynamic steps sequence online eager chain"
  echo "beside the list: lora reductions mixers tests"
}

[ $# -gt 0 ] || list
for one in "$@"; do part "$one"; done
exit $failed
