"""What an engine of benchmarks/engine.py sends, made up."""


def result(tokens, gaps):
    """One sequence; in every context token 100 + chosen is second, `gap` below."""
    return {
        "tokens": [tokens],
        "top": [[[[t, -0.1], [t + 100, -0.1 - g]] for t, g in zip(tokens, gaps, strict=True)]],
    }


TOKENS = [1, 2, 3, 4]
BASE = {**result(TOKENS, [2.0] * 4), "runner": "V2"}
