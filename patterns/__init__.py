"""Patterns of an MLA decode graph: the attention site, and the spellings of RoPE before it."""
