"""How an MLA decode graph is rewritten: one file per pass; `pipeline` lists and runs them."""
