"""`mla-fusion bench`; `kit` is what it shares with `benchmarks/`."""
