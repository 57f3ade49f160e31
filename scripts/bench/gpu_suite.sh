#!/usr/bin/env bash
# All measurements on a GPU, in three parts of at most 9 minutes each.
#
#   scripts/bench/gpu_suite.sh 1|2|3 [OUT]                    # OUT: a folder, default results/h100
#   GPT_FAST=../gpt-fast DOUBLE_SPARSE=../DoubleSparse scripts/bench/gpu_suite.sh 2      # checkouts of peers to measure, too
#   PACK=h100.tar.gz scripts/bench/gpu_suite.sh 3 /tmp/h100   # also pack OUT into one file after every step
#   SMALL=1 scripts/bench/gpu_suite.sh 1 /tmp/out             # the same steps on the CPU with toy models, to try the suite
#
# 1  environment and ceilings, kernel tests, attention with its stages at the sizes of the goals, compute-sanitizer
# 2  decode end to end at batch 8 with gpt-fast, attention over the papers' grids and over lengths
# 3  a prompt of 128K, the published Double Sparsity, what compression adds to prefill, time to the second token,
#    offloading, decode with transformers, decode at batch 1 with gpt-fast
#
# Every step has a deadline, in seconds since the part began; the time a step leaves goes to the next one. Benchmarks
# measure the most important sizes first, write after every size, and stop in time. OUT/steps.json has each step's command,
# exit status and seconds. Running a part again on the same commit continues where it stopped. The exit code is 1 if a step
# failed; a step that was skipped, or ran out of time, did not fail. Afterwards `python -m scripts.report.update_readme`
# writes the tables of results/README.md from results/h100.
set -uo pipefail
die() { echo "error: $*" >&2; exit 2; }
case ${1:-} in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    1 | 2 | 3) PART=$1 ;;
    *) die "give the part, 1, 2 or 3: scripts/bench/gpu_suite.sh 1 [OUT]" ;;
esac
[ $# -le 2 ] || die "too many arguments: scripts/bench/gpu_suite.sh 1|2|3 [OUT]"
cd "$(dirname "$0")/../.." || exit 2
OUT=${2:-results/h100} PACK=${PACK:-} SMALL=${SMALL:-} FAILED=0
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONUNBUFFERED=1
[ -z "${GPT_FAST:-}" ] || [ -f "$GPT_FAST/generate.py" ] || die "GPT_FAST=$GPT_FAST is no checkout of gpt-fast"
[ -z "${DOUBLE_SPARSE:-}" ] || [ -f "$DOUBLE_SPARSE/models/generate.py" ] ||
    die "DOUBLE_SPARSE=$DOUBLE_SPARSE is no checkout of DoubleSparse"

# prints those of the named modules that are not installed
missing() {
    "$PYTHON" -c 'import sys; from importlib.util import find_spec as f; print(*[m for m in sys.argv[1:] if not f(m)])' "$@"
}
NEEDED=$(missing torch triton numpy tqdm safetensors sentencepiece tiktoken jinja2 regex) || die "$PYTHON does not run"
[ -z "$NEEDED" ] || die "$PYTHON has no $NEEDED: pip install -r requirements.txt"
ABSENT=" $(missing pytest hypothesis xdist transformers) "
[ "$ABSENT" = "  " ] || echo "=== not installed, so that steps are skipped or slower:$ABSENT"
[ -n "$SMALL" ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "torch finds no GPU: SMALL=1 tries the suite on a CPU"
mkdir -p "$OUT" 2>/dev/null || die "cannot make the folder $OUT"
COMMIT=$(git rev-parse --short HEAD 2>/dev/null)

# note NAME STATUS SECONDS COMMAND: adds an entry to steps.json; a STATUS that is not a number is the reason to skip it
note() {
    "$PYTHON" - "$OUT" "$PART" "$COMMIT" "$@" <<'EOP'
import json, os, re, sys
out, part, commit, name, status, seconds, command = sys.argv[1:]
path = os.path.join(out, "steps.json")
steps = json.load(open(path)) if os.path.exists(path) else []
entry = dict(part=int(part), step=name, command=command, commit=commit)
if status.lstrip("-").isdigit():
    log = open(os.path.join(out, name + ".log"), errors="replace").read().strip().splitlines()
    log = [x for x in log if "%|" not in x and not re.match(r"\[\d+:\d\d", x)]  # progress
    entry |= dict(status=int(status), seconds=int(seconds), timed_out=status in ("124", "130", "137"), last=log[-3:])
else:
    entry |= dict(skipped=status)
steps = [s for s in steps if s["step"] != name] + [entry]
with open(path + ".tmp", "w") as f:
    json.dump(steps, f, indent=1)
os.replace(path + ".tmp", path)
EOP
    [ -z "$PACK" ] || { tar -czf "$PACK.tmp" --exclude "$(basename "$PACK")*" -C "$OUT" . && mv "$PACK.tmp" "$PACK"; }
}

skip() {
    echo "=== $1 skipped: $2"
    note "$1" "$2" 0 ""
}

# passed NAME: whether an earlier run of this commit completed the step
passed() {
    "$PYTHON" - "$OUT/steps.json" "$COMMIT" "$1" 2>/dev/null <<'EOP'
import json, sys
path, *wanted = sys.argv[1:]
sys.exit(not any([s["commit"], s["step"]] == wanted and s.get("status") == 0 for s in json.load(open(path))))
EOP
}

# step NAME DEADLINE COMMAND...: sends Ctrl-C at the deadline, so that scripts keep their results
step() {
    local name=$1 left=$(($2 - SECONDS)) begin=$SECONDS status
    shift 2
    if passed "$name" && [[ " $* " != *" --resume "* ]]; then echo "=== $name was done before"; return; fi
    if [ $left -lt 10 ]; then skip "$name" "no time is left"; return; fi
    echo "=== $name (at most $left s): $*"
    # a shell started in the background ignores Ctrl-C, and so would its children
    env --default-signal=INT timeout -s INT -k 15 "$left" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    note "$name" "$status" $((SECONDS - begin)) "$*"
    case $status in 0 | 124 | 130 | 137) ;; *) FAILED=1; echo "=== $name failed with $status" >&2 ;; esac
}

# attention NAME DEADLINE ARGS... and generate NAME DEADLINE ARGS...: write OUT/NAME.json, start nothing in the last seconds
attention() {
    step "$1" "$2" "$PYTHON" -m scripts.bench.bench_attention --resume "${A[@]}" --time-limit $(($2 - SECONDS - 15)) \
        --out "$OUT/$1.json" "${@:3}"
}
generate() {
    step "$1" "$2" "$PYTHON" -m scripts.bench.bench_generate --resume "${G[@]}" --time-limit $(($2 - SECONDS - 25)) \
        --out "$OUT/$1.json" "${@:3}"
}

LLAMA2=llama-2-7b LLAMA3=llama-3.1-8b MODE=blocks
A=(--device cuda --rounds 20) G=(--device cuda --rounds 3 --new 64)
SIZES=(8x32768 8x4096 8x16384 4x65536 8x8192) PREFILL=1x32768 SECOND=(1x8192 1x16384 1x65536 1x49152) LONG=1x131008
TESTS=()
for f in tests/test_triton_*.py; do [ "$f" = tests/test_triton_compile.py ] || TESTS+=("$f"); done
if [ -n "$SMALL" ]; then
    export OMP_NUM_THREADS=1
    mkdir -p "$OUT/shapes"
    for f in llama-2-7b:4 llama-3.1-8b:2; do
        cat >"$OUT/shapes/${f%:*}.json" <<EOP
{"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": ${f#*:}, "hidden_act": "silu", "max_position_embeddings": 131072,
 "rms_norm_eps": 1e-5}
EOP
    done
    LLAMA2=$OUT/shapes/llama-2-7b.json LLAMA3=$OUT/shapes/llama-3.1-8b.json MODE=eager
    A=(--device cpu --no-compile --rounds 2) G=(--device cpu --rounds 1 --new 4)
    SIZES=(8x4096 2x64) PREFILL=1x1024 SECOND=(1x8192 1x512) LONG=1x2048
    TESTS=(tests/test_kernels_torch.py -k topk)
fi
# the most important first
MAIN=(full sals-12.5 self_index-7.5 double_sparsity)
ALL=("${MAIN[@]}" razor ojakv-0.6 double_sparsity_offload sals-25 streaming)
PEERS=()
[ -n "${GPT_FAST:-}" ] && PEERS+=("gpt-fast:$GPT_FAST")
SALS=(sals-12.5 sals-25 double_sparsity,budget=0.125) # Table 6: 1/8 of the tokens for all methods

if [ "$PART" = 1 ]; then
    [ -n "$SMALL" ] || step nvidia-smi 20 nvidia-smi -q
    step environment 35 "$PYTHON" -m scripts.bench.bench_attention "${A[@]}" --ceilings --out "$OUT/environment.json"
    if [[ $ABSENT == *" pytest "* || $ABSENT == *" hypothesis "* ]]; then
        skip kernel_tests "pytest or hypothesis is not installed here"
    else
        [[ -n $SMALL || $ABSENT == *" xdist "* ]] || TESTS+=(-n 8) # most of their time is Triton's compiler
        step kernel_tests 190 "$PYTHON" -m pytest -q -m "not slow" --maxfail=20 --durations=5 "${TESTS[@]}"
    fi
    attention attention_goals 340 --model "$LLAMA3" --size 8x32768 --method "${ALL[@]}" flexgen
    attention attention_goals_mha 390 --model "$LLAMA2" --size 8x4096 --method "${SALS[@]}" self_index-7.5 full
    # Self-Indexing KVCache, Table 4
    attention attention_self_index 425 --model "$LLAMA3" --size 10x16384 --method self_index-7.5
    # every method, and settings that use other kernels or bit widths, or make `maintain` run its kernels; more than 16K
    # slots use other selection kernels
    ONCE=("$PYTHON" -m scripts.bench.bench_attention "${A[@]}" --no-compile --once --size 2x300 1x17000 --model "$LLAMA3"
          --method all sals-25,recent=16 sals-12.5,recent=16 sals,score=softmax,recent=16 self_index-7.5
          self_index,store_bits=8 self_index-16bit self_index,tail=8,flush=8 double_sparsity,label_bits=2
          double_sparsity,label_bits=16 flexgen
          ojakv,update_every=8 ojakv,latent=False razor,window=64,retrieval_method=self_index --out "$OUT/once.json")
    step once 455 "${ONCE[@]}"
    if command -v compute-sanitizer >/dev/null && [ -z "$SMALL" ]; then
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # allocates every tensor separately, so that its end is guarded
        step sanitizer 540 compute-sanitizer --tool memcheck --error-exitcode 9 "${ONCE[@]}"
        unset PYTORCH_NO_CUDA_MEMORY_CACHING
    else
        skip sanitizer "compute-sanitizer is not installed here"
    fi
fi

if [ "$PART" = 2 ]; then
    [ ${#PEERS[@]} -gt 0 ] || skip gpt_fast "GPT_FAST is not set to a checkout of gpt-fast"
    # SALS, Table 7, which does not name its shapes: grouped queries, because 64K at batch 4 would not fit otherwise
    generate generate_batch8 385 --synthetic --random-init "$LLAMA3" --mode $MODE --method "${MAIN[@]}" sals-25 \
        --peer "${PEERS[@]}" --size "${SIZES[@]}"
    # SALS, Table 6
    attention attention_sals 450 --no-stages --model "$LLAMA2" --method "${SALS[@]}" \
        --size 8x4096 16x4096 16x2048 8x2048 8x1024 16x1024
    # Double Sparsity, Fig. 5 and Table 4
    attention attention_double_sparsity 485 --no-stages --model "$LLAMA2" --method double_sparsity \
        --size 32x4096 4x16384 32x16384 4x4096 32x8192 32x2048 4x8192 4x2048
    attention attention_lengths 540 --no-stages --model "$LLAMA3" --method "${MAIN[@]}" \
        --size 8x4096 8x16384 1x131072 8x65536 1x32768 8x8192 1x8192 1x4096 8x2048 8x1024
fi

if [ "$PART" = 3 ]; then
    generate prompt_128k 240 --rounds 1 --warm-up 0 --random-init "$LLAMA3" --mode $MODE --size $LONG --method "${ALL[@]}"
    if [ -n "${DOUBLE_SPARSE:-}" ]; then
        PEERS+=("double-sparse:$DOUBLE_SPARSE")
    else
        skip double_sparse "DOUBLE_SPARSE is not set to a checkout of DoubleSparse"
    fi
    if [ ${#PEERS[@]} -gt 0 ]; then # Double Sparsity, Fig. 6 (a)(b)
        generate generate_llama2 330 --synthetic --random-init "$LLAMA2" --mode $MODE --size 8x4096 \
            --method full double_sparsity --peer "${PEERS[@]}"
    fi
    generate prefill 395 --rounds 2 --prefill --random-init "$LLAMA3" --size $PREFILL --method "${ALL[@]:1}"
    # Self-Indexing KVCache, Table 3
    generate second_token 430 --rounds 2 --prefill --random-init "$LLAMA3" --size "${SECOND[@]}" --method self_index-7.5
    # Double Sparsity, Fig. 6 (c)(d)
    generate offload 470 --rounds 2 --new 16 --synthetic --random-init "$LLAMA3" --mode $MODE \
        --size 1x65536 8x16384 1x32768 --method double_sparsity_offload flexgen double_sparsity_offload-sync
    if [[ $ABSENT == *" transformers "* ]]; then
        skip generate_transformers "transformers is not installed here"
    else
        generate generate_transformers 505 --synthetic --random-init "$LLAMA3" --mode $MODE --size 8x4096 --method full \
            --peer transformers
    fi
    generate generate_batch1 525 --synthetic --random-init "$LLAMA3" --mode $MODE --method "${MAIN[@]}" \
        --size 1x32768 1x4096 1x16384 1x65536 1x8192 ${GPT_FAST:+--peer "gpt-fast:$GPT_FAST"}
fi
echo "=== part $PART ended after $SECONDS s: $OUT/steps.json"
exit $FAILED
