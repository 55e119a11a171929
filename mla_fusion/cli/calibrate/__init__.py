"""`mla-fusion calibrate`."""
