"""mla-fusion: graph passes that fuse the MLA decode query preparation in vLLM."""

__version__ = "0.1.0"
