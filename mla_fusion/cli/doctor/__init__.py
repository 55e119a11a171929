"""`mla-fusion doctor`: the environment, and known trouble with it."""
