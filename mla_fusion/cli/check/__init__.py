"""`mla-fusion check`: a model's configuration, the source of vLLM, and an engine on a cut model."""
