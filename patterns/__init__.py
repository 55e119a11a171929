"""What an MLA decode graph looks like: the attention site, and how the graph writes RoPE.

`spellings` lists the ways to write RoPE and is where a new one is added.
"""
