"""How an MLA decode graph is rewritten: one file per pass, their order in `pipeline.PASSES`."""
