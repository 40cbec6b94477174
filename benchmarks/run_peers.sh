#!/usr/bin/env bash
# Runs pagedcore and the two fastest peers one after the other, on the same workloads.
#
#   run_peers.sh MODEL_DIR OPENVINO_MODEL_DIR PAGEDCORE_PYTHON VLLM_PYTHON OPENVINO_PYTHON RESULTS [WORKLOADS]
#
# MODEL_DIR is what peers/make_model.py wrote, OPENVINO_MODEL_DIR its export by optimum-cli (--weight-format fp32; it
# computes in bfloat16). Set VLLM_PRELOAD to tcmalloc and libiomp5 (LD_PRELOAD's form): vLLM is slower without.
#
# In int8: PAGEDCORE_OPTIONS="--quantization w8a8", VLLM_MODEL=what `pagedcore convert MODEL_DIR --quantization w8a8`
# wrote, and an export of OpenVINO's with --weight-format int8, with OPENVINO_OPTIONS="--group-size 128" at its best.
set -euo pipefail
model=$1 openvino_model=$2 pagedcore=$3 vllm=$4 openvino=$5 results=$6 workloads=${7:-w3,w2,w2p,w1}
here=$(cd "$(dirname "$0")" && pwd)
last_core=$(($(nproc) - 1))
export HF_HUB_OFFLINE=1
# A session of its own for each peer: where the kernel schedules sessions against each other, priorities need it.
setsid -w "$pagedcore" "$here/peers/run_pagedcore.py" --model "$model" --workloads "$workloads" --results "$results" \
    ${PAGEDCORE_OPTIONS:-}
VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-$last_core VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING LD_PRELOAD=${VLLM_PRELOAD:-} \
    setsid -w "$vllm" "$here/peers/run_vllm.py" --model "${VLLM_MODEL:-$model}" --workloads "$workloads" --results "$results"
setsid -w "$openvino" "$here/peers/run_openvino.py" --model "$openvino_model" --workloads "$workloads" --results "$results" \
    ${OPENVINO_OPTIONS:-}
