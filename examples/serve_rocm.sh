#!/usr/bin/env bash
# Serve an MLA model on AMD GPUs: serve_rocm.sh [MODEL [ARGUMENT_OF_VLLM_SERVE...]]
# The provider is AITER's. Not yet run on AMD hardware (docs/compatibility.md).
set -euo pipefail
export VLLM_ROCM_USE_AITER=1
exec vllm serve "${1:-deepseek-ai/DeepSeek-V2-Lite}" "${@:2}" \
    -cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True
