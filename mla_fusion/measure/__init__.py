"""Timing, cases, peers, exact results and outcomes: shared by commands and benchmarks."""
