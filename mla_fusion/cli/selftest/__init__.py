"""`mla-fusion selftest`."""
