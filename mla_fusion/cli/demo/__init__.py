"""`mla-fusion demo`, and the small models that it runs."""
