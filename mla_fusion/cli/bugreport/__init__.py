"""`mla-fusion bugreport`: what the other commands find, in one file."""
