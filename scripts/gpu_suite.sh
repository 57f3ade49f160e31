#!/usr/bin/env bash
# Everything that is measured on a GPU, in three parts of under 10 minutes each.
#
#   scripts/gpu_suite.sh 1|2|3 [OUT]                    # OUT: a folder, default results/h100
#   GPT_FAST=../gpt-fast scripts/gpu_suite.sh 3         # a checkout of gpt-fast, to be measured in the same run
#   SMALL=1 scripts/gpu_suite.sh 1 /tmp/out             # the same steps on the CPU at toy sizes, to try the suite itself
#
# 1  environment and ceilings, kernel tests, compute-sanitizer, attention with its stages at the sizes of the goals,
#    registers and spills of every kernel
# 2  attention over the grid of models, batches and lengths; decode end to end at batch 8
# 3  gpt-fast and transformers beside us, decode at batch 1, what compression adds to prefill, a prompt of 128K, plots
#
# Every step has a time limit of its own, writes its JSON as it goes, and is entered in OUT/steps.json with its command,
# exit status and seconds: a cut-off run keeps what it has, and a part that is run again goes on where it stopped.
# Exits with 1 if a step failed; one that could only be skipped, or ran out of its time, is no failure.
set -uo pipefail
cd "$(dirname "$0")/.."
PART=${1:-} OUT=${2:-results/h100}
case $PART in 1 | 2 | 3) ;; *) echo "error: give the part, 1, 2 or 3: scripts/gpu_suite.sh 1 [OUT]" >&2; exit 2 ;; esac
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
mkdir -p "$OUT" || exit 2
FAILED=0

# note NAME STATUS SECONDS COMMAND: one more entry of steps.json; what is not a number is why it was skipped
note() {
    "$PYTHON" - "$OUT" "$PART" "$@" <<'EOF'
import json, os, sys
out, part, name, status, seconds, command = sys.argv[1:]
path = os.path.join(out, "steps.json")
steps = json.load(open(path)) if os.path.exists(path) else []
entry = dict(part=int(part), step=name, command=command)
if status.lstrip("-").isdigit():
    log = open(os.path.join(out, name + ".log"), errors="replace").read().strip().splitlines()
    log = [x for x in log if "%|" not in x]  # progress bars
    entry |= dict(status=int(status), seconds=int(seconds), timed_out=status in ("124", "130", "137"), last=log[-3:])
else:
    entry |= dict(skipped=status)
steps = [s for s in steps if s["step"] != name] + [entry]
with open(path + ".tmp", "w") as f:
    json.dump(steps, f, indent=1)
os.replace(path + ".tmp", path)
EOF
}

# step NAME SECONDS COMMAND...: run with a limit; Ctrl-C first, so that scripts keep what they have
step() {
    local name=$1 limit=$2 begin status
    shift 2
    echo "=== $name (at most $limit s): $*"
    begin=$SECONDS
    timeout -s INT -k 15 "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    note "$name" "$status" $((SECONDS - begin)) "$*"
    case $status in 0 | 124 | 130 | 137) ;; *) FAILED=1; echo "=== $name failed with $status" >&2 ;; esac
}

skip() {
    echo "=== $1 skipped: $2"
    note "$1" "$2" 0 ""
}

METHODS=(full sals-12.5 self_index-7.5 double_sparsity razor sals-25)
if [ -n "${SMALL:-}" ]; then
    export OMP_NUM_THREADS=1
    cat >"$OUT/small.json" <<'EOF'
{"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 1024,
 "rms_norm_eps": 1e-5}
EOF
    LLAMA2=$OUT/small.json LLAMA3=$OUT/small.json QWEN=$OUT/small.json
    A=(--device cpu --no-compile --rounds 2) G=(--device cpu --rounds 1 --new 4) MODE=eager
    GOALS=(128) GRID=(64 128) BATCHES=(1 2) LONG=128 LENGTHS=(64 128) MANY=2 PREFILL=256
    METHODS=(full "sals-12.5,recent=8,sinks=4" "self_index-7.5,sinks=4" double_sparsity) SALS512="sals-12.5,budget=96"
    TESTS=(tests/test_kernels_torch.py -k topk)
else
    LLAMA2=llama-2-7b LLAMA3=llama-3.1-8b QWEN=qwen3-8b
    A=(--device cuda --rounds 20) G=(--device cuda --rounds 3 --new 64) MODE=blocks
    GOALS=(32768 4096) GRID=(32768 4096 131072 8192 16384 65536 1024 2048) BATCHES=(8 1 16 4 32) LONG=131008
    LENGTHS=(32768 4096 16384 8192 65536) MANY=8 PREFILL=32768 SALS512="sals-12.5,budget=512"
    TESTS=()
    for f in tests/test_triton_*.py; do TESTS+=("$f"); done
fi
ATTENTION=("$PYTHON" scripts/bench_attention.py --resume "${A[@]}")
GENERATE=("$PYTHON" scripts/bench_generate.py --resume "${G[@]}")

# Limits of a part add up to less than 600 s; --time-limit ends a grid before its step's limit interrupts it.
if [ "$PART" = 1 ]; then
    [ -z "${SMALL:-}" ] && step nvidia-smi 10 nvidia-smi -q
    step environment 40 "$PYTHON" scripts/bench_attention.py "${A[@]}" --ceilings --out "$OUT/environment.json"
    step kernel_tests 170 "$PYTHON" -m pytest -q --maxfail=20 --durations=5 "${TESTS[@]}"
    # every method, and the settings that take other kernels or other bit widths
    ONCE=("$PYTHON" scripts/bench_attention.py "${A[@]}" --no-compile --once --batch 2 --length 300 --model "$LLAMA3"
          --method all sals-25,recent=16 sals-12.5,recent=16 self_index-7.5 self_index,store_bits=8 self_index-16bit
          double_sparsity,label_bits=2 double_sparsity,label_bits=16 ojakv,latent=true
          razor,window=64,retrieval_method=self_index --out "$OUT/once.json")
    step once 30 "${ONCE[@]}"
    if command -v compute-sanitizer >/dev/null && [ -z "${SMALL:-}" ]; then
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor an allocation of its own, so that its end is guarded
        step sanitizer 110 compute-sanitizer --tool memcheck --error-exitcode 9 "${ONCE[@]}"
        unset PYTORCH_NO_CUDA_MEMORY_CACHING
    else
        skip sanitizer "compute-sanitizer is not installed here"
    fi
    step attention_goals 170 "${ATTENTION[@]}" --time-limit 130 --model "$LLAMA3" "$LLAMA2" --batch "${MANY}" \
        --length "${GOALS[@]}" --method "${METHODS[@]}" --out "$OUT/attention_goals.json"
    step kernel_report 60 "$PYTHON" scripts/kernel_report.py --cc 90 --out "$OUT/kernels.json"
fi

if [ "$PART" = 2 ]; then
    step attention_llama3 190 "${ATTENTION[@]}" --no-stages --time-limit 160 --model "$LLAMA3" \
        --batch "${BATCHES[@]}" --length "${GRID[@]}" --method "${METHODS[@]:0:4}" --out "$OUT/attention_llama3.json"
    # SALS, Table 6: Llama-2-7B shapes, batch 8 and 16, 512 tokens attended
    step attention_llama2 100 "${ATTENTION[@]}" --no-stages --time-limit 80 --model "$LLAMA2" \
        --batch "${BATCHES[0]}" "${BATCHES[-1]}" --length "${GRID[@]:0:2}" \
        --method full "$SALS512" double_sparsity self_index-7.5 --out "$OUT/attention_llama2.json"
    step attention_qwen3 60 "${ATTENTION[@]}" --no-stages --time-limit 45 --model "$QWEN" \
        --batch "${MANY}" --length "${GRID[@]:0:2}" --method "${METHODS[@]:0:4}" --out "$OUT/attention_qwen3.json"
    step generate_batch8 210 "${GENERATE[@]}" --synthetic --time-limit 170 --random-init "$LLAMA3" --mode $MODE \
        --batch "${MANY}" --length "${LENGTHS[@]}" --method "${METHODS[@]:0:4}" --out "$OUT/generate_batch8.json"
fi

if [ "$PART" = 3 ]; then
    PEERS=()
    if [ -n "${GPT_FAST:-}" ]; then
        PEERS=("gpt-fast:$GPT_FAST")
    else
        skip gpt_fast "GPT_FAST is not set to a checkout of gpt-fast"
    fi
    PEER_RUN=("${GENERATE[@]}" --synthetic --mode $MODE --batch 1 --length "${LENGTHS[1]}" --method full)
    step peers_llama3 130 "${PEER_RUN[@]}" --random-init "$LLAMA3" --peer "${PEERS[@]}" transformers \
        --out "$OUT/peers_llama3.json"
    if [ ${#PEERS[@]} -gt 0 ]; then
        step peers_llama2 100 "${PEER_RUN[@]}" --random-init "$LLAMA2" --peer "${PEERS[@]}" \
            --out "$OUT/peers_llama2.json"
    fi
    step prefill 75 "${GENERATE[@]}" --rounds 2 --prefill --random-init "$LLAMA3" --batch 1 --length "$PREFILL" \
        --method "${METHODS[@]}" --out "$OUT/prefill.json"
    step prompt_128k 180 "${GENERATE[@]}" --rounds 1 --warm-up 0 --random-init "$LLAMA3" --mode $MODE --batch 1 \
        --length "$LONG" --method "${METHODS[@]}" --out "$OUT/prompt_128k.json"
    step generate_batch1 80 "${GENERATE[@]}" --synthetic --time-limit 60 --random-init "$LLAMA3" --mode $MODE \
        --batch 1 --length "${LENGTHS[@]}" --method "${METHODS[@]:0:4}" --out "$OUT/generate_batch1.json"
    FILES=()
    for f in "$OUT"/attention_*.json "$OUT"/generate_*.json; do [ -e "$f" ] && FILES+=("$f"); done
    if [ ${#FILES[@]} -gt 0 ]; then
        step plots 25 "$PYTHON" scripts/plot_results.py "${FILES[@]}" --out "$OUT"
    else
        skip plots "nothing was measured yet"
    fi
fi
echo "=== part $PART ended after $SECONDS s: $OUT/steps.json"
exit $FAILED
