"""mla-fusion: graph passes that fuse the MLA decode query preparation in vLLM."""

import logging

__version__ = "0.1.0"
# Below vLLM's logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.mla_fusion")
