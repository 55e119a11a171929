"""What an MLA decode graph looks like: the attention site, and how the graph writes RoPE."""
