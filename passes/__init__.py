"""The passes that rewrite an MLA decode graph, a file each; `pipeline` lists and runs them."""
