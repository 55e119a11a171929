"""Measured plans, written by benchmarks/tune_dispatch.py: do not edit by hand.

TABLE[device name] has its "arch", and for "fp8_query" and "activation_query" a dictionary from
head count to rows [largest token count, fields of dispatch.Plan that differ from the default].
"""

from __future__ import annotations

from typing import Any

TABLE: dict[str, Any] = {
    "NVIDIA H200": {
        "arch": "sm_90",
        "fp8_query": {
            8: [
                [1, {"block_m": 1, "block_n": 32, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [32, {"block_m": 32, "cache_tokens": 2, "pdl": True}],
                [64, {"block_m": 32, "rope_rows": 32, "rest_last": True, "pdl": True}],
                [128, {"block_m": 64, "cache_tokens": 4, "pdl": True}],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 4,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
            ],
            16: [
                [1, {"block_m": 1, "block_n": 32, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [32, {"block_m": 32, "rope_rows": 32, "rest_last": True, "pdl": True}],
                [
                    64,
                    {
                        "block_m": 64,
                        "rope_rows": 32,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [128, {"block_m": 64, "rope_rows": 32, "cache_tokens": 2, "pdl": True}],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 4,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 16,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
            ],
            32: [
                [1, {"block_m": 1, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [32, {"block_m": 32, "cache_tokens": 2, "pdl": True}],
                [64, {"block_m": 64, "rope_rows": 32, "pdl": True}],
                [
                    128,
                    {
                        "block_m": 64,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 2,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 16,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
            ],
            64: [
                [1, {"block_m": 1, "block_n": 32, "num_warps": 2, "pdl": True}],
                [16, {"pdl": True}],
                [
                    32,
                    {
                        "block_m": 32,
                        "rope_rows": 32,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    64,
                    {
                        "block_m": 64,
                        "cache_tokens": 2,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    128,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 64,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 64,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 8,
                        "rope_rows": 64,
                        "cache_tokens": 16,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
            ],
            128: [
                [1, {"block_m": 1, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 128, "rest_last": True, "pdl": True}],
                [
                    32,
                    {
                        "block_m": 32,
                        "block_n": 128,
                        "rope_rows": 32,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    64,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 64,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    128,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 128,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 128,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 256,
                        "m_tiles": 8,
                        "rope_rows": 128,
                        "cache_tokens": 16,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
            ],
        },
        "activation_query": {
            8: [
                [1, {"block_m": 1, "block_n": 32, "rest_last": True, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [32, {"block_m": 32, "block_n": 32, "pdl": True}],
                [64, {"block_m": 32, "cache_tokens": 2, "pdl": True}],
                [128, {"block_m": 64, "cache_tokens": 4, "pdl": True}],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 4,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 8,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
            ],
            16: [
                [1, {"block_m": 1, "block_n": 32, "rest_last": True, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [32, {"block_m": 32, "block_n": 32, "rope_rows": 32, "num_warps": 8, "pdl": True}],
                [
                    64,
                    {
                        "block_m": 64,
                        "cache_tokens": 2,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    128,
                    {
                        "block_m": 64,
                        "rope_rows": 32,
                        "cache_tokens": 2,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 4,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
            ],
            32: [
                [1, {"block_m": 1, "num_warps": 2, "pdl": True}],
                [16, {"block_n": 32, "pdl": True}],
                [
                    32,
                    {
                        "block_m": 32,
                        "rope_rows": 32,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [64, {"block_m": 64, "cache_tokens": 2, "num_warps": 8, "pdl": True}],
                [
                    128,
                    {
                        "block_m": 64,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "cache_tokens": 2,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 128,
                        "cache_tokens": 8,
                        "pdl": True,
                    },
                ],
            ],
            64: [
                [1, {"block_m": 1, "block_n": 32, "num_warps": 2, "pdl": True}],
                [16, {"pdl": True}],
                [32, {"block_m": 32, "rest_last": True, "num_warps": 8, "pdl": True}],
                [64, {"block_m": 64, "rope_rows": 32, "num_warps": 8, "pdl": True}],
                [
                    128,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 32,
                        "cache_tokens": 4,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 128,
                        "cache_tokens": 4,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 256,
                        "m_tiles": 4,
                        "rope_rows": 128,
                        "cache_tokens": 16,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
            ],
            128: [
                [1, {"block_m": 1, "rest_last": True, "num_warps": 2, "pdl": True}],
                [16, {"pdl": True}],
                [
                    32,
                    {
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 32,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    64,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "rope_rows": 64,
                        "rest_last": True,
                        "num_warps": 8,
                        "pdl": True,
                    },
                ],
                [
                    128,
                    {
                        "block_m": 64,
                        "block_n": 128,
                        "m_tiles": 2,
                        "rope_rows": 128,
                        "cache_tokens": 2,
                        "pdl": True,
                    },
                ],
                [
                    256,
                    {
                        "block_m": 64,
                        "block_n": 256,
                        "m_tiles": 4,
                        "rope_rows": 128,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
                [
                    2147483647,
                    {
                        "block_m": 64,
                        "block_n": 256,
                        "m_tiles": 8,
                        "rope_rows": 256,
                        "cache_tokens": 8,
                        "rest_last": True,
                        "pdl": True,
                    },
                ],
            ],
        },
    }
}
