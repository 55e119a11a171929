"""What the flag switches on in an engine, or why it is switched off."""

import logging
from typing import Any

from mla_fusion import config, report
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice

logger = logging.getLogger("vllm.mla_fusion")


def apply(vllm_config: Any, decline: Decline | None) -> None:
    """Switch the prerequisites on, or the flag off."""
    compilation = vllm_config.compilation_config
    if decline:
        setattr(compilation.pass_config, config.FLAG, False)
        setattr(compilation.pass_config, config.THRESHOLD, None)
        logger.warning("%s is switched off: %s", report.FLAG_LINE, decline.explain())
        return
    if compilation.splitting_ops != [] and not compilation.use_inductor_graph_partition:
        compilation.use_inductor_graph_partition = True
        said = "%s sets for the whole engine, prefill included: %s"
        logger.info(said, report.FLAG_LINE, config.PARTITION)
    pass_config = compilation.pass_config
    if not vllm_compat.is_gpu():
        # vLLM switches it on where RoPE and cache write share a graph, but its pass manager only
        # imports that pass for GPUs.
        pass_config.fuse_rope_kvcache_cat_mla = False
    elif vllm_config.parallel_config.decode_context_parallel_size > 1:
        # Its kernel takes a slot of -1 for padding and rotates neither query nor key there; under
        # decode context parallelism that is the slot of another rank's token, also in prefill.
        if pass_config.fuse_rope_kvcache_cat_mla:
            logger.warning(
                "mla-fusion: fuse_rope_kvcache_cat_mla is switched off: under decode context "
                "parallelism it leaves the tokens of other ranks unrotated"
            )
        pass_config.fuse_rope_kvcache_cat_mla = False
    decode_choice.choose_page(vllm_config)
    asked, bucket = getattr(pass_config, config.THRESHOLD), config.decode_bucket(vllm_config)
    if asked not in (None, bucket):
        logger.warning(
            "mla-fusion: %s=%d becomes %d: it is at least 2, vLLM's smallest compile range, and "
            "at most max_num_batched_tokens",
            config.THRESHOLD, asked, bucket,
        )  # fmt: skip
    # Kept: the bucket depends on the sizes of CUDA graphs, which vLLM may change later.
    setattr(pass_config, config.THRESHOLD, bucket)
    endpoints = set(compilation.compile_ranges_endpoints or [])
    if bucket not in endpoints:
        compilation.compile_ranges_endpoints = sorted({*endpoints, bucket})
        provider = config.read_options(vllm_config.additional_config).provider
        fused = "%s: graphs for up to %d tokens are fused by the %s provider"
        logger.debug(fused, config.FLAG, bucket, provider)
