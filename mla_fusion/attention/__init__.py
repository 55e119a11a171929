"""Persistent MLA decode: a plan for each step, and who executes it.

A plan says which CTA decodes which keys of which sequence. It is allocated once, for the largest
batch, and refreshed in place at every step; its addresses never change, so that a captured CUDA
graph can read it. All layers of a step share it. Nothing here needs vLLM.
"""

import dataclasses
import functools
import inspect
from typing import Any, Self

import torch

from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.attention.plan import planner
from mla_fusion.attention.plan.buffers import PlanBuffers, Settings, Step
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.inputs import Inputs, check_step, validate
from mla_fusion.kernels import ProviderUnavailable, load
from mla_fusion.kernels.inputs import check

__all__ = [
    "PROVIDERS", "Epilogue", "PersistentDecodePlan", "ProviderUnavailable", "get_provider",
    "persistent_mla_decode",
]  # fmt: skip

PROVIDERS = ("reference", "triton", "aiter")


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class PersistentDecodePlan(PlanBuffers):
    """`PlanBuffers` with the planner that writes them, a module that has

    PROVIDERS               names of the providers that execute its plans, the default first
    allocate(settings)      the fields of `PlanBuffers`; raises where it cannot plan
    fill(plan, qo_indptr, seq_lens, max_query_len)    writes the plan of a step, in place"""

    planner: Any

    @classmethod
    def allocate(cls, **arguments: Any) -> Self:
        """A plan for the fields of `plan.buffers.Settings`, which says what they mean; `device` may
        be a string.

        Raises:
            TypeError: an argument is missing, or is none of these.
            ValueError: an argument is out of range, or AITER was asked for and has no kernel.
            ProviderUnavailable: AITER was asked for and is not here.
        """
        known = [field.name for field in dataclasses.fields(Settings)]
        if unknown := sorted(arguments.keys() - known):
            raise TypeError(f"allocate has no {', '.join(unknown)}: it takes {', '.join(known)}")
        settings = Settings(**arguments)
        module: Any = planner_aiter if settings.planner == "aiter" else planner
        if module is planner and settings.device.type != "cpu":
            # Imported here: a CPU does without Triton.
            from mla_fusion.attention.plan import planner_triton as module
        return cls(**module.allocate(settings), planner=module)

    def refresh(
        self, *, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int,
        max_query_len: int,
    ) -> None:  # fmt: skip
        """Plan one step, in place: no host sync, the same addresses. So on a GPU types and shapes
        alone are checked, and on a CPU the values too.

        The portable planner is one kernel on a GPU and allocates nothing: a captured refresh
        replays with the lengths that `qo_indptr` and `seq_lens` hold then.

        Args:
            qo_indptr: [batch + 1] int32 (vLLM's query_start_loc), from 0, not decreasing.
                Sequences without rows are padding.
            seq_lens: [batch] int32, KV tokens of each sequence, its new ones included; on a CPU
                2^31 - 1 together, at most.
            num_tokens: query rows of the step, padding included: the first dimension of the query.
            max_query_len: most query rows of a sequence in this step.

        Raises:
            ValueError: the step is larger than the plan, or a tensor is not as above.
        """
        check_step(self, qo_indptr, seq_lens, num_tokens, max_query_len)
        self.planner.fill(self, qo_indptr, seq_lens, max_query_len)
        self.step = Step(seq_lens.shape[0], num_tokens, max_query_len)
        self.fresh = True
        self.refreshes += 1


@functools.cache
def get_provider(name: str) -> Any:
    """The module that implements provider `name`, after its `require()` found all it needs.

    A provider module has `require() -> None`, which raises `ProviderUnavailable`. If it executes
    plans of the portable planner, it has `plan_settings(num_heads, max_query_len, kv_dtype, width,
    device)`, the arguments of `allocate` that suit its kernel for cache entries of `width` = L + R;
    `warm_up_batches(plan, values)`, numbers of sequences that compile, together, all that it
    launches, with an epilogue of `values` columns a head unless that is None; and
    `unsupported(q_dtype, kv_dtype, latent, rope)`, why it does not decode such queries over such a
    cache, or an empty string. And it has `persistent_mla_decode(given) -> None`, which gets
    validated `Inputs` and writes their `out`, `lse` and `epilogue.out` in place. It raises
    ValueError, before any launch, for what it does not support. Nothing falls back."""
    return load(__name__, PROVIDERS, name)


def portable_provider(device: torch.device) -> str:
    """Who executes a plan of the portable planner: the reference on a CPU, Triton on a GPU."""
    return "reference" if device.type == "cpu" else "triton"


# `help` shows the fields of `Settings` as the arguments that they are.
_FIELDS = inspect.signature(Settings).parameters.values()
PersistentDecodePlan.allocate.__func__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)]
    + [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in _FIELDS]
)


def persistent_mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, plan: PersistentDecodePlan, *,
    block_table: torch.Tensor, softmax_scale: float, q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None, out: torch.Tensor | None = None,
    return_lse: bool = False, epilogue: Epilogue | None = None, provider: str = "auto",
    kept: list[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of absorbed decode queries over the latent cache, causal at its end.

    For row i of the n query rows of a sequence of s KV tokens, with L the latent width:

        out = softmax(softmax_scale * q . k[:s - (n - 1 - i)]) @ k[:s - (n - 1 - i), :L]

    where k is the sequence's cached [latent | rope] rows. A row that sees no key is zero, with an
    LSE of -inf. Rows of `out` after the last sequence are not written. A NaN in a key makes output
    and LSE of the rows that see it NaN. Except with the reference, the output of earlier query rows
    of the same sequence, which do not see that key, may be NaN too.

    Args:
        q: [T, H, L + R], bf16, fp16 or fp8, dense in the last dimension; the rows of sequence b
            are qo_indptr[b] ... qo_indptr[b + 1] - 1 of the step the plan was refreshed for.
        kv_cache: [blocks, page_size, L + R], the type the plan was allocated for; dense in the last
            dimension. Blocks and entries may be strided.
        plan: refreshed for this step; it alone has the lengths.
        block_table: [batch, max_blocks] int32, the blocks of each sequence in order; those after
            its end are not read. max_blocks covers the longest sequence, and the cache has every
            block. The reference alone checks both: no other provider reads the device.
        softmax_scale: of the scores; the scales below come on top.
        q_scale: one fp32 element on the device, with which an fp8 query is dequantized:
            value = stored * scale. It is needed, and read, for fp8 alone; else it may be None.
        kv_scale: the same of the cache.
        out: [T, H, L], bf16, fp16 or fp32; by default new, of q's type, bf16 for fp8.
        return_lse: also return the log-sum-exp of the scaled scores, natural logarithm.
        epilogue: what follows the attention, in the same launches. `out` is then a workspace of
            w_uv's type for latents. Its rows after the last sequence of the plan are read: the
            product of each is the row of `epilogue.out`.
        provider: who computes it, one of `PROVIDERS`, or "auto": the first of its planner's.
        kept: an empty list for calls that make the same launches again, unchecked: for tensors at
            the same addresses, which they do not keep alive, and a plan as `fresh` as it is now. It
            stays empty if torch or AITER computes a part.

    Returns:
        (out, or `epilogue.out` with an epilogue; lse [T, H] fp32, or None unless asked for).

    Raises:
        ProviderUnavailable: the provider cannot run here.
        ValueError: an argument breaks the table above, the plan was refreshed for another step,
            or the provider does not support the combination.
    """
    check("provider", isinstance(provider, str), "a string, such as 'triton'", provider)
    check("plan", isinstance(plan, PersistentDecodePlan), "a PersistentDecodePlan", plan)
    kind = type(epilogue).__name__  # not itself: shown, it would read its tensors
    check("epilogue", epilogue is None or isinstance(epilogue, Epilogue), "an Epilogue", kind)
    if provider == "auto":
        provider = plan.planner.PROVIDERS[0]
    if provider in PROVIDERS and provider not in plan.planner.PROVIDERS:
        raise ValueError(
            f"the plan is for {' and '.join(plan.planner.PROVIDERS)}, not for {provider}: allocate "
            'it with planner="aiter" for aiter, with planner="portable" for the others'
        )
    module = get_provider(provider)
    check("q", isinstance(q, torch.Tensor), "a tensor", q)
    if out is None:
        dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
        dtype = dtype if epilogue is None else epilogue.w_uv.dtype
        out = q.new_empty((*q.shape[:2], plan.settings.v_head_dim), dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    given = Inputs(
        q, kv_cache, plan, block_table, softmax_scale, q_scale, kv_scale, out, lse, epilogue,
        kept=kept,
    )  # fmt: skip
    validate(given)
    module.persistent_mla_decode(given)
    return out if epilogue is None else epilogue.out, lse
