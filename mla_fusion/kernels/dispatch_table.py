"""Measured plans, written by benchmarks/tune_dispatch.py: do not edit by hand.

TABLE[device name] has its "arch", and for "fp8_query" and "activation_query" a dictionary from
head count to rows [largest token count, fields of dispatch.Plan that differ from the default].
"""

from __future__ import annotations

from typing import Any

TABLE: dict[str, Any] = {}
