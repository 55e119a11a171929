"""What an MLA decode graph looks like: the attention site and the spellings of RoPE around it."""
