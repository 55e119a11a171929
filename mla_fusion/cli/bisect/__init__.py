"""`mla-fusion bisect`."""
