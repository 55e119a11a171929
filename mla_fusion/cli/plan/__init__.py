"""`mla-fusion plan`, and its drawings."""
