"""Whether the flag applies to an engine, decided while vLLM makes the engine's config, and what it
switches on there."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mla_fusion import config, logger
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import flag
from mla_fusion.plugin.wrap import wrap

if TYPE_CHECKING:
    from mla_fusion.report.reasons import Decline

_SINGLE_TRACE = 2  # CompilationMode.DYNAMO_TRACE_ONCE, an IntEnum
# Compilation configs whose operator was told of a flag that is off, or of misplaced options, by id:
# other configs of an engine, as a draft model's, are made with the same one.
_told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_told_names: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def decide_in_vllm_config() -> None:
    """Why: whether fusion can work must be known before vLLM makes what the flag needs. In one
    graph for all steps the decode bucket must be a compile-range endpoint.

    How: decide in `_set_compile_ranges` (the defaults and the platform are applied by then, the
    ranges and the splitting ops are not), and add the ops to splitting_ops after `__post_init__`.
    Until: vLLM lets a plugin take part in config resolution.
    """
    from vllm.config import VllmConfig

    wrap(VllmConfig, "__post_init__", _post_init)
    wrap(VllmConfig, "_set_compile_ranges", _set_compile_ranges)


def keep_vllm_compile() -> None:
    """Why: on a CPU vLLM replaces its piecewise backend, which runs passes, by a single trace.

    How: if only the mode speaks against fusion, restore mode and backend after the platform's
    check. Until: vLLM keeps VLLM_COMPILE on a CPU.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        wrap(type(current_platform), "check_and_update_config", _check_and_update_config)


def _check_and_update_config(original: Callable[..., Any], vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    asked = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
    original(vllm_config)
    became = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
    compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked
    on = became[0] == _SINGLE_TRACE and config.is_on(vllm_config)
    if on and _why_not(vllm_config) is None:
        # vLLM would derive them from the sizes of CUDA graphs, which a CPU does not have.
        compilation.compile_sizes = compilation.compile_sizes or []
        logger.debug("%s needs compilation mode VLLM_COMPILE, kept on the CPU", config.FLAG)
    else:
        compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = became


def _post_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    passes = self.compilation_config.pass_config
    if config.FLAG in vars(passes):  # set as an attribute: make vLLM's PassConfig one of ours
        fields = {config.FLAG: False, config.THRESHOLD: None, **vars(passes)}
        passes.__class__ = type(flag.instance(fields))
        passes.__dict__ = fields
    _warn_of_misplaced(self)
    if not config.is_on(self):
        _warn_of_no_effect(self)
        original(self, *args, **kwargs)
        return
    original(self, *args, **kwargs)
    compilation = self.compilation_config
    if config.rewrites(compilation) and config.in_one_graph(compilation):
        from mla_fusion import ops

        splitting = compilation.splitting_ops or []
        if "vllm::unified_mla_attention_with_output" in splitting:
            missing = [op for op in ops.RUNTIME_OPS if op not in splitting]
            compilation.splitting_ops = [*splitting, *missing]


def _set_compile_ranges(original: Callable[..., Any], self: Any) -> None:
    if config.is_on(self):
        apply(self)
    original(self)


def _why_not(vllm_config: Any) -> "Decline | None":
    from mla_fusion.config import eligibility

    return eligibility.why_not(vllm_config)


def apply(vllm_config: Any) -> None:
    """Switch on what the flag needs in an engine, or the flag off."""
    from mla_fusion import report
    from mla_fusion.runtime import decode_choice

    compilation = vllm_config.compilation_config
    pass_config = compilation.pass_config
    if decline := _why_not(vllm_config):
        setattr(pass_config, config.FLAG, False)
        setattr(pass_config, config.THRESHOLD, None)
        _told[id(compilation)] = compilation
        logger.warning("%s is switched off: %s", report.FLAG_LINE, decline.explain())
        return
    if not vllm_compat.is_gpu():
        # vLLM's defaults switch fusions on by what is compiled, but its pass manager imports their
        # passes for GPUs alone, and raises NameError here.
        for name in vars(pass_config):
            if name.startswith(("fuse_", "enable_")) and name != config.FLAG:
                setattr(pass_config, name, False)
    elif vllm_config.parallel_config.decode_context_parallel_size > 1:
        # Its kernel takes a slot of -1 for padding and rotates neither query nor key there; under
        # decode context parallelism that is the slot of another rank's token, also in prefill.
        if pass_config.fuse_rope_kvcache_cat_mla:
            logger.warning(
                "mla-fusion: fuse_rope_kvcache_cat_mla is switched off: under decode context "
                "parallelism it leaves the tokens of other ranks unrotated"
            )
        pass_config.fuse_rope_kvcache_cat_mla = False
    options = config.read_options(vllm_config.additional_config)
    if page := decode_choice.page_of(vllm_config, options):
        # As if the operator had asked: else vLLM asks the backend when the model is loaded.
        cache = vllm_config.cache_config
        cache.block_size, cache.user_specified_block_size = page, True
        logger.debug("the portable decode may run: block_size is %d", page)
    if vllm_compat.is_batch_invariant():
        setattr(pass_config, config.THRESHOLD, None)  # every step is served
        return
    asked, bucket = getattr(pass_config, config.THRESHOLD), config.decode_bucket(vllm_config)
    if asked not in (None, bucket):
        logger.warning(
            "mla-fusion: %s=%d becomes %d: it is at least 2, vLLM's smallest compile range, and "
            "at most max_num_batched_tokens",
            config.THRESHOLD, asked, bucket,
        )  # fmt: skip
    # Kept: the bucket depends on the sizes of CUDA graphs, which vLLM may change later.
    setattr(pass_config, config.THRESHOLD, bucket)
    if config.in_one_graph(compilation):
        endpoints = {*(compilation.compile_ranges_endpoints or ()), bucket}
        compilation.compile_ranges_endpoints = sorted(endpoints)
    fused = "%s: decode steps of up to %d tokens are fused by the %s provider"
    logger.debug(fused, config.FLAG, bucket, options.provider)


def _warn_of_misplaced(vllm_config: Any) -> None:
    """Name once the keys of additional_config that are meant for this plugin and not read."""
    compilation = vllm_config.compilation_config
    if id(compilation) in _told_names:
        return
    _told_names[id(compilation)] = compilation
    for key in config.misplaced(vllm_config.additional_config):
        logger.warning(
            'mla-fusion: additional_config["%s"] is not read: options belong into '
            'additional_config["%s"]', key, config.OPTIONS_KEY,
        )  # fmt: skip


def _warn_of_no_effect(vllm_config: Any) -> None:
    """Name once what an operator set for a flag that is off: the threshold, and the options unless
    the sparse decode reads them, which it does without the flag."""
    compilation, given = vllm_config.compilation_config, vllm_config.additional_config
    if id(compilation) in _told:
        return
    _told[id(compilation)] = compilation
    sparse, unused = vllm_compat.chose_sparse_backend(vllm_config), []
    if getattr(compilation.pass_config, config.THRESHOLD, None) is not None:
        unused.append(config.THRESHOLD)
    if isinstance(given, dict) and config.OPTIONS_KEY in given and not sparse:
        unused.append(f'additional_config["{config.OPTIONS_KEY}"]')
    for name in unused:
        logger.warning(
            "mla-fusion: %s has no effect without pass_config.%s: set both", name, config.FLAG
        )
