#!/usr/bin/env bash
# Serve an MLA model on NVIDIA GPUs: serve_nvidia.sh [MODEL [ARGUMENT_OF_VLLM_SERVE...]]
set -euo pipefail
exec vllm serve "${1:-deepseek-ai/DeepSeek-V2-Lite}" "${@:2}" \
    -cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True
