"""Entry point of `vllm.general_plugins`: the one file that changes objects of a served vLLM.

Each change says why it is needed, how it is made, and until when. `register` may be called any
number of times, in any process. While the flag is off, nothing here changes what vLLM does.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from mla_fusion import config, ops, report, runtime
from mla_fusion.config import no_effect, vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import collectives, decode_choice, metrics, sparse_step, step_plan, tables

if TYPE_CHECKING:
    from collections.abc import Callable

# Below vLLM's logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.mla_fusion")

_WRAPPED = "_mla_fusion_wrapped"  # on a method that was replaced, or a platform whose method was
_REFUSED = "_mla_fusion_refused"  # on a VllmConfig: what the operator switched off
_STEPS = "_mla_fusion_step_counter"  # on a worker and on its MLA layers
_GROUP = "_mla_fusion_group"  # on a metadata builder: (its worker's counter, its first layer)
# CompilationMode.DYNAMO_TRACE_ONCE, an IntEnum
_SINGLE_TRACE = 2
_registered = False


def register() -> None:
    """Make the flag known to vLLM and the passes available. Called by vLLM in every process."""
    global _registered
    if _registered:
        return
    _registered = True
    version = vllm_compat.installed_version()
    if vllm_compat.is_supported(version):
        _add_fields_to_pass_config()
        _decide_in_vllm_config()
        _add_passes_to_pass_manager()
        _keep_vllm_compile_on_cpu()
        _prepare_workers()
        # vLLM's own registry: nothing is imported before an operator chooses CUSTOM.
        if not vllm_compat.register_sparse_backend(sparse_step.BACKEND):
            logger.debug("another plugin has the attention backend CUSTOM")
        return
    # Let the flag be set, and switch it off with its reason, if this release allows that.
    try:
        _add_fields_to_pass_config()
        _decide_in_vllm_config()
    except (ImportError, AttributeError, TypeError) as error:
        detail = f"{version}, supported are {vllm_compat.window()}; {error}"
        why = Decline("vllm-version", detail).explain()
        logger.warning("%s is unknown, mla_fusion is inactive: %s", report.FLAG_LINE, why)


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace method `name` of `owner` by make(original), once."""
    original = getattr(owner, name)
    if getattr(original, _WRAPPED, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, wrapper)


def _add_fields_to_pass_config() -> None:
    """Why: vLLM's PassConfig forbids unknown fields, so `pass_config.fuse_aiter_...` is an error.

    How: `PassConfig(...)` with one of the two fields makes an instance of a subclass that has them,
    and from then on CompilationConfig prints them. Without them it stays vLLM's own: whatever
    prints, compares, copies, hashes or pickles a config never meets the plugin. Until: vLLM lets a
    plugin declare pass options.
    """
    import vllm.config.compilation as compilation

    from mla_fusion.config import pass_config

    base = compilation.PassConfig
    if hasattr(base, _WRAPPED):
        return
    fields = {config.FLAG, config.THRESHOLD}
    extended = pass_config.extend(base, _restore)
    show = functools.cache(pass_config.show_subclass)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not base or fields.isdisjoint(kwargs):
            return object.__new__(cls)
        show(compilation.CompilationConfig, base)
        return object.__new__(extended)

    base.__new__ = new
    setattr(base, _WRAPPED, True)


def _restore(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, in a process that may not have loaded the plugin."""
    register()
    from vllm.config import PassConfig

    restored = PassConfig.__new__(PassConfig, **fields)
    restored.__dict__.update(fields)
    return restored


def _decide_in_vllm_config() -> None:
    """Why: the decode bucket must be a compile-range endpoint, and RoPE, cache write and attention
    must end up in one graph, before vLLM freezes both.

    How: note what the operator set before `VllmConfig.__post_init__`, decide in
    `_set_compile_ranges` (the defaults and the platform are applied by then, the ranges and the
    splitting ops are not), and add the ops to splitting_ops afterwards. Until: vLLM lets a plugin
    take part in config resolution.
    """
    from vllm.config import VllmConfig

    def post_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            pass_config = self.compilation_config.pass_config
            _adopt(pass_config)
            if not config.is_on(self):
                no_effect.warn(self, vllm_compat.chose_sparse_backend(self, sparse_step.BACKEND))
                original(self, *args, **kwargs)
                return
            setattr(self, _REFUSED, config.refused_by_operator(self.compilation_config))
            try:
                original(self, *args, **kwargs)
            finally:
                # `replace`, with which vLLM makes a draft model's config, only takes known fields.
                delattr(self, _REFUSED)
            if config.is_on(self):
                _extend_splitting_ops(self.compilation_config)

        return wrapper

    def set_compile_ranges(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any) -> None:
            if config.is_on(self):
                _apply_decision(self)
            original(self)

        return wrapper

    _wrap(VllmConfig, "__post_init__", post_init)
    _wrap(VllmConfig, "_set_compile_ranges", set_compile_ranges)


def _adopt(pass_config: Any) -> None:
    """Make vLLM's PassConfig one of ours if the flag was set on it as an attribute."""
    if config.FLAG in vars(pass_config):
        fields = {config.FLAG: False, config.THRESHOLD: None, **vars(pass_config)}
        pass_config.__class__ = type(_restore(fields))
        pass_config.__dict__ = fields


def _decide(vllm_config: Any) -> config.Decision:
    refused: frozenset[str] = getattr(vllm_config, _REFUSED, frozenset())
    return config.decide(vllm_config, partition_refused=config.PARTITION in refused)


def _apply_decision(vllm_config: Any) -> None:
    """Switch the prerequisites on, or the flag off."""
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    refused: frozenset[str] = getattr(vllm_config, _REFUSED, frozenset())
    decision = _decide(vllm_config)
    if decision.decline:
        setattr(compilation.pass_config, config.FLAG, False)
        setattr(compilation.pass_config, config.THRESHOLD, None)
        no_effect.is_told(compilation)
        logger.warning("%s is switched off: %s", report.FLAG_LINE, decision.decline.explain())
        return
    switched = []
    if compilation.splitting_ops != [] and not compilation.use_inductor_graph_partition:
        compilation.use_inductor_graph_partition = True
        switched.append(config.PARTITION)
    inductor = compilation.inductor_compile_config
    if current_platform.is_cuda_alike() and config.REALIZE not in inductor:
        inductor[config.REALIZE] = 1  # else RMS norms add up to five residual tensors anew
        switched.append(f"{config.REALIZE}=1")
    pass_config = compilation.pass_config
    if not current_platform.is_cuda_alike():
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
    elif not pass_config.fuse_rope_kvcache_cat_mla and config.ROPE_CAT not in refused:
        pass_config.fuse_rope_kvcache_cat_mla = True
        switched.append(config.ROPE_CAT)
    if switched:
        said = "%s sets for the whole engine, prefill included: %s"
        logger.info(said, report.FLAG_LINE, ", ".join(switched))
    decode_choice.choose_page(vllm_config)
    asked = getattr(pass_config, config.THRESHOLD)
    if asked not in (None, decision.bucket):
        logger.warning(
            "mla-fusion: %s=%d becomes %d: it is at least 2, vLLM's smallest compile range, and "
            "at most max_num_batched_tokens",
            config.THRESHOLD, asked, decision.bucket,
        )  # fmt: skip
    # Kept: the bucket depends on the sizes of CUDA graphs, which vLLM may change later.
    setattr(pass_config, config.THRESHOLD, decision.bucket)
    endpoints = set(compilation.compile_ranges_endpoints or [])
    if decision.bucket not in endpoints:
        compilation.compile_ranges_endpoints = sorted({*endpoints, decision.bucket})
        fused = "%s: graphs for up to %d tokens are fused by the %s provider"
        logger.debug(fused, config.FLAG, decision.bucket, decision.provider)


def _extend_splitting_ops(compilation: Any) -> None:
    if "vllm::unified_mla_attention_with_output" in (compilation.splitting_ops or []):
        missing = [op for op in ops.RUNTIME_OPS if op not in compilation.splitting_ops]
        compilation.splitting_ops = [*compilation.splitting_ops, *missing]


def _add_passes_to_pass_manager() -> None:
    """Why: vLLM's hook for custom passes has one slot, which belongs to the user, and its last
    step cannot be extended.

    How: after `PostGradPassManager.configure`, append the passes and put pass 5 in place of
    `fix_functionalization`. Until: vLLM takes several custom passes.
    """
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.platforms import current_platform

    def configure(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, vllm_config: Any) -> None:
            original(self, vllm_config)
            if not config.is_on(vllm_config):
                return
            from mla_fusion.passes.pipeline import LastStep, MLAFusionPass

            options = config.read_options(vllm_config.additional_config)
            bucket, rows = config.decode_bucket(vllm_config), 1 + config.draft_tokens(vllm_config)
            self.add(MLAFusionPass(options.provider, bucket, options.attention, rows))
            # vLLM's last step names CUDA-only ops and raises on a CPU build.
            rest = None if current_platform.is_cpu() else self.fix_functionalization
            self.fix_functionalization = LastStep(rest)

        return wrapper

    _wrap(PostGradPassManager, "configure", configure)


def _keep_vllm_compile_on_cpu() -> None:
    """Why: on a CPU vLLM replaces its piecewise backend, which runs passes, by a single trace.

    How: if only the mode speaks against fusion, restore mode and backend after the platform's
    check. Until: vLLM keeps VLLM_COMPILE on a CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    original = platform.check_and_update_config
    if hasattr(platform, _WRAPPED):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        original(vllm_config)
        became = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked
        if became[0] == _SINGLE_TRACE and keeps_vllm_compile(vllm_config):
            # vLLM would derive them from the sizes of CUDA graphs, which a CPU does not have.
            compilation.compile_sizes = compilation.compile_sizes or []
            logger.debug("%s needs compilation mode VLLM_COMPILE, kept on the CPU", config.FLAG)
        else:
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = became

    platform.check_and_update_config = classmethod(check_and_update_config)
    setattr(platform, _WRAPPED, True)


def keeps_vllm_compile(vllm_config: Any) -> bool:
    """Whether fusion would apply to this engine if its compilation mode stayed as it was."""
    return config.is_on(vllm_config) and _decide(vllm_config).applies


def _prepare_workers() -> None:
    """Why: a worker must know the ops, have its kernels compiled and its plans made before a
    request. The operator must read what fused, even from a warm compile cache.

    How: register the ops and make a step counter when a worker is made; wrap methods of its class,
    which overrides them. Every worker answers `collective_rpc("mla_fusion_steps")`, even if the
    flag was switched off: vLLM would raise NotImplementedError. Until: vLLM offers hooks after
    loading, reloading and compilation.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            _wrap(type(self), "load_model", _prepare_layers)
            _wrap(type(self), "compile_or_warm_up_model", _warm_up_and_publish)
            for name in filter(lambda name: hasattr(type(self), name), vllm_compat.LOADS_WEIGHTS):
                _wrap(type(self), name, tables.refreshing)
            original(self, *args, **kwargs)
            if config.is_on(self.vllm_config):
                # No pass registers the ops if a graph that calls them comes from a warm cache.
                runtime.register_ops()
                setattr(self, _STEPS, metrics.StepCounter(self.vllm_config.parallel_config.rank))
                _count_steps()
                report.forget()

        return wrapper

    def mla_fusion_steps(self: Any) -> dict[str, dict[str, int]]:
        steps: metrics.StepCounter | None = getattr(self, _STEPS, None)
        return {} if steps is None else steps.snapshot()

    _wrap(WorkerBase, "__init__", init)
    WorkerBase.mla_fusion_steps = mla_fusion_steps


def _prepare_layers(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """`load_model` of a worker, after which its layers have its step counter, and what persistent
    and sparse decodes need: it must be there before vLLM measures what memory is left."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        sparse_step.attach(layers, self.vllm_config)
        if config.is_on(self.vllm_config):
            for layer in vllm_compat.mla_layers(layers).values():
                setattr(layer, _STEPS, getattr(self, _STEPS))
            options = config.read_options(self.vllm_config.additional_config)
            step_plan.attach(layers, options, self.vllm_config)
        return result

    return wrapper


def _warm_up_and_publish(compile_or_warm_up_model: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the kernels before `compile_or_warm_up_model` of a worker captures graphs, because
    nothing may compile during capture; then publish the report and count steps."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.is_on(self.vllm_config):
            return compile_or_warm_up_model(self, *args, **kwargs)
        made, cached = collectives.prepare(self.vllm_config)
        result = compile_or_warm_up_model(self, *args, **kwargs)
        if vllm_compat.is_first_rank():
            report.publish(made, self.vllm_config.model_config.architecture, cached)
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        getattr(self, _STEPS).start(made, sizes)
        return result

    return wrapper


def _count_steps() -> None:
    """Why: an operator wants to see how many steps take the fused path, and under full CUDA graphs
    the ops run no Python.

    How: count what `MLACommonMetadataBuilder.build` returns, under the name of the first layer the
    builder was made for. That layer holds the counter of its worker. `runtime.metrics` says which
    passes have no build. Until: vLLM lets a plugin observe steps.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(
            self: Any, spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kwargs: Any
        ) -> None:
            original(self, spec, layer_names, vllm_config, *args, **kwargs)
            layers = vllm_config.compilation_config.static_forward_context
            steps = getattr(layers.get(layer_names[0]), _STEPS, None)
            setattr(self, _GROUP, (steps, layer_names[0]))

        return wrapper

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = original(self, *args, **kwargs)
            steps, name = getattr(self, _GROUP, (None, ""))  # None: it is older than this wrapper
            if steps is not None:
                steps.count(name, metadata)
            return metadata

        return wrapper

    _wrap(MLACommonMetadataBuilder, "__init__", init)
    _wrap(MLACommonMetadataBuilder, "build", build)
