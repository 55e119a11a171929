"""Counts of what the property tests reached, printed at the end of a run.

A property test counts with `add`; `lines` is what `tests/conftest.py` shows.
"""

from collections import Counter

_counts = {}


def add(test, **counts):
    """Count for one property test; "declined__code" counts a decline for a reason."""
    _counts.setdefault(test, Counter()).update(counts)


def counts():
    """All that was counted in this process."""
    return {test: dict(counted) for test, counted in _counts.items()}


def merge(others):
    """Add what another process counted."""
    for test, counted in others.items():
        add(test, **counted)


def lines():
    """One line for each property test that ran."""
    return [f"{test}: {_line(counts)}" for test, counts in sorted(_counts.items())]


def _line(counts):
    reasons = {k.removeprefix("declined__"): n for k, n in counts.items() if "__" in k}
    words = [f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if "__" not in name]
    if reasons:
        listed = ", ".join(f"{n} {code}" for code, n in sorted(reasons.items()))
        words.append(f"{sum(reasons.values())} declined ({listed})")
    return ", ".join(words)
