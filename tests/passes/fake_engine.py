"""The part of an engine that a decode graph needs to run: layers, KV caches and a batch.

`run` executes a graph inside vLLM's own forward context, so vLLM's ops and this library's find
the same layers. What vLLM's backends do (cache write, attention) is written here in plain torch.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import fx
from vllm.config.utils import Range
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import report
from mla_fusion.config import eligibility
from mla_fusion.kernels import reference
from mla_fusion.passes import pipeline
from mla_fusion.patterns.site import attention_calls
from tests.passes import graphs
from tests.passes.graphs import HEADS, LATENT, NOPE, ROPE, Spec

BLOCKS, BLOCK_SIZE = 6, 4
POISON = 0xA5  # every byte of a cache before a step


@dataclass(frozen=True)
class Batch:
    """A step: `rows` in the graph, of which `actual` are tokens and `decode` decode tokens.

    Attributes:
        slots: how many slots vLLM passes: all rows, or the actual tokens only.
        holes: rows whose slot is -1 although they are not padding.
        profile: the profile run, which has no metadata and no slots.
        order: the slot of each row; None for a fixed permutation.
    """

    rows: int
    actual: int
    decode: int
    slots: int | None = None
    holes: tuple[int, ...] = ()
    profile: bool = False
    order: tuple[int, ...] | None = None

    @property
    def decode_only(self):
        return not self.profile and self.actual == self.decode > 0

    def slot_mapping(self):
        """Distinct slots, -1 for rows that are padding or holes."""
        if self.profile:
            return None
        if self.order is None:
            generator = torch.Generator().manual_seed(7)
            slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[: self.rows].clone()
        else:
            slots = torch.tensor(self.order, dtype=torch.int64)
        slots[self.actual :] = -1
        slots[list(self.holes)] = -1
        return slots if self.slots is None else slots[: self.slots]


DECODE = Batch(rows=5, actual=5, decode=5)
MIXED = Batch(rows=5, actual=5, decode=2)
BATCHES = {
    "decode": DECODE,
    "padded": Batch(rows=5, actual=3, decode=3),
    "short slots": Batch(rows=5, actual=3, decode=3, slots=3),
    "holes": Batch(rows=5, actual=5, decode=5, holes=(1,)),
    "mixed": MIXED,
    "prefill": Batch(rows=5, actual=4, decode=0),
    "profile": Batch(rows=5, actual=5, decode=5, profile=True),
}


class Impl:
    """A backend: the cache write and the decode attention, in plain torch."""

    def __init__(self, quantized_query):
        self.supports_quant_query_input = quantized_query
        self.dcp_world_size = 1
        self.queries: list[torch.Tensor] = []  # what `forward_mqa` was given
        self.prompts: list[torch.Tensor] = []  # q, kv_c and k_pe of all other rows

    def do_kv_cache_update(
        self, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False
    ):
        """vLLM says from 0.33 on that the scale is 1 and its kernel need not divide."""
        assert not skip_scale or k_scale == 1
        cache = kv_cache.view(torch.float8_e4m3fn) if kv_cache_dtype == "fp8" else kv_cache
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                entry = torch.cat((kv_c[row], k_pe[row].flatten()))
                entry = reference.cast(entry, cache.dtype, k_scale)
                cache.view(torch.uint8)[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = entry.view(
                    torch.uint8
                )

    def forward_mqa(self, q, kv_cache, metadata, layer):
        """Attention of each row to the batch's entries in the cache, in float64."""
        self.queries.append(q.clone())
        slots = metadata.slots[metadata.slots >= 0]
        keys = kv_cache.flatten(0, 1).float()[slots].double()
        weights = torch.einsum("thd,sd->ths", q.double(), keys).softmax(-1)
        return torch.einsum("ths,sl->thl", weights, keys[:, :LATENT]).to(layer.W_UK_T.dtype), None


class Layer(MLAAttention):
    """An MLA layer of vLLM without its set-up; what the fused ops read of it is real."""

    def __init__(self, name, spec, quantized_query=False):
        torch.nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(len(name))
        self.layer_name, self.num_heads, self.q_pad_num_heads = name, HEADS, None
        self.kv_cache_dtype = spec.kv_cache_dtype
        self.hisparse_cache, self.use_sparse, self.use_pcp = None, False, False
        self.pcp_shard_decode_requests = False
        self.impl = Impl(quantized_query)
        self._k_scale, self._k_scale_float = torch.tensor(0.5), 0.5
        self._q_scale = torch.tensor(0.25)
        self.kv_lora_rank, self.qk_rope_head_dim = LATENT, ROPE
        self.qk_nope_head_dim, self.v_head_dim = NOPE, spec.value
        self.W_UK_T = torch.randn((HEADS, NOPE, LATENT), generator=generator).to(spec.dtype)
        self.W_UV = torch.randn((HEADS, LATENT, spec.value), generator=generator).to(spec.dtype)
        stored = torch.uint8 if spec.kv_cache_dtype == "fp8" else spec.dtype
        size = torch.empty((), dtype=stored).element_size()
        poison = torch.full((BLOCKS, BLOCK_SIZE, (LATENT + ROPE) * size), POISON, dtype=torch.uint8)
        self.kv_cache = poison.view(stored)

    def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, **unused):
        """Decode rows by `forward_mqa`; a formula that reads all of q, kv_c and k_pe for others."""
        if attn_metadata is None:
            return output.fill_(0)
        decode, actual = attn_metadata.num_decode_tokens, attn_metadata.num_actual_tokens
        if decode:
            absorbed = reference.absorb(q[:decode, :, :NOPE], self.W_UK_T)
            query = torch.cat((absorbed, q[:decode, :, NOPE:]), dim=-1)
            if self.impl.supports_quant_query_input:
                query = reference.cast(query, torch.float8_e4m3fn, self._q_scale)
            cache = kv_cache
            if self.kv_cache_dtype == "fp8":
                cache = kv_cache.view(torch.float8_e4m3fn)
            attended, _ = self.impl.forward_mqa(query, cache, attn_metadata, self)
            self._v_up_proj(attended, output[:decode])
        rest = slice(decode, actual)
        mixed = torch.cat((q[rest].flatten(1), k_c_normed[rest], k_pe[rest].flatten(1)), dim=-1)
        self.impl.prompts += [mixed] if len(mixed) else []
        width = output.shape[1]
        mixed = mixed.repeat(1, -(-width // mixed.shape[1]))
        output[rest] = torch.tanh(mixed)[:, -width:] + torch.tanh(mixed.sum(-1, True))
        return output

    def _v_up_proj(self, x, out):
        out.copy_(torch.einsum("thl,hlv->thv", x, self.W_UV).flatten(1))


@dataclass
class Engine:
    """The layers of a graph, with poisoned caches."""

    spec: Spec
    quantized_query: bool = False
    layers: dict[str, Layer] = field(init=False)

    def __post_init__(self):
        self.layers = {
            name: Layer(name, self.spec, self.quantized_query)
            for name in graphs.layer_names(self.spec)
        }

    def context(self, batch):
        """vLLM's forward context for a step."""
        slots = batch.slot_mapping()
        metadata = None
        if slots is not None:
            metadata = SimpleNamespace(
                num_actual_tokens=batch.actual, num_decode_tokens=batch.decode, slots=slots
            )
        return ForwardContext(
            no_compile_layers=dict(self.layers),
            attn_metadata=dict.fromkeys(self.layers, metadata),
            slot_mapping=dict.fromkeys(self.layers, slots) if slots is not None else {},
        )

    def facts_of(self):
        """What the passes take: the facts of the layer that an op's argument names; no layer has a
        plan."""
        attention = "portable" if self.spec.quantized else "auto"
        facts = {
            name: eligibility.facts(layer, "reference", self.spec.dtype, attention)
            for name, layer in self.layers.items()
        }
        return pipeline.by_argument(facts)

    def caches(self):
        """The bytes of all caches."""
        return [layer.kv_cache.view(torch.uint8) for layer in self.layers.values()]


aten = torch.ops.aten
UNDEFINED = 7.0  # every number in memory that nothing wrote
_EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty_strided.default
}  # fmt: skip


class _Interpreter(fx.Interpreter):
    """Runs a graph; memory that torch leaves undefined gets a fixed value."""

    def call_function(self, target, args, kwargs):
        args = tuple(_encode(a) for a in args)
        kwargs = {k: _encode(v) if k == "layer_name" else v for k, v in kwargs.items()}
        result = super().call_function(target, args, kwargs)
        if target in _EMPTY:
            result.fill_(UNDEFINED)
        return result


def _encode(value):
    """Layer names baked into a graph, in the form in which this process's ops take them."""
    is_name = isinstance(value, str) and value.startswith("model.layers.")
    return _encode_layer_name(value) if is_name else value


@dataclass
class Outcome:
    """What a step leaves: outputs of the graph; of each layer what it was given, and its cache."""

    outputs: list[torch.Tensor]
    queries: list[list[torch.Tensor]]
    prompts: list[list[torch.Tensor]]
    caches: list[torch.Tensor]


def execute(module, values, compiled=None):
    """What a graph, or what was `compiled` of it, returns for these values of its inputs, of as
    many tokens as there are positions."""
    flat: list[object] = []
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name.startswith("tokens"):
            flat.append(len(values["positions"]))
        elif node.name.startswith("layer_name"):
            flat.append(_encode_layer_name(f"model.layers.{node.name.split('_')[-1]}.attn"))
        else:
            flat.append(values[node.name].clone())
    with torch.no_grad():
        return compiled(flat) if compiled else _Interpreter(module).run(*flat)


def run(module, spec, batch=DECODE, quantized_query=False, seed=0, compiled=None):
    """Execute a graph of `graphs.build(spec)`, before or after passes, on fresh caches; or what
    `inductor.through` compiled of it.

    Use the `plain_kernels` fixture around it.
    """
    engine = Engine(spec, quantized_query)
    values = graphs.inputs(spec, batch.rows, seed)
    slots = batch.slot_mapping()
    if slots is not None:
        # vLLM leaves garbage there, which must never be an index.
        values["positions"][: len(slots)][slots < 0] = 0
    with override_forward_context(engine.context(batch)):
        outputs = execute(module, values, compiled)
    tensors = [o.clone() for o in outputs if isinstance(o, torch.Tensor)]
    impls = [layer.impl for layer in engine.layers.values()]
    queries, prompts = [impl.queries for impl in impls], [impl.prompts for impl in impls]
    return Outcome(tensors, queries, prompts, engine.caches())


# element size of a cache -> its type
_STORED = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def assert_same(before, after, batch, *, tolerance=None):
    """Outputs and queries of real rows and all cache bytes are equal, or close by `tolerance`.

    A row without a slot is padding, whose query is zero after the passes.
    """
    slots = batch.slot_mapping()
    real = slice(None) if slots is None else slots >= 0
    for a, b in zip(before.outputs, after.outputs, strict=True):
        if slots is not None and a.dim() and a.shape[0] == batch.rows:
            a, b = a[: len(slots)][real], b[: len(slots)][real]
        _assert_close(a, b, tolerance)
    for wanted, found in zip(before.queries, after.queries, strict=True):
        for query in wanted:
            decoded = slots[: len(query)] >= 0  # there is no query without slots
            assert_found(query[decoded], [other[decoded] for other in found], tolerance)
    for a, b in zip(before.caches, after.caches, strict=True):
        written_a, written_b = ((x != POISON).any(-1) for x in (a, b))
        assert torch.equal(written_a, written_b), "other slots were written"
        if tolerance is None:
            assert torch.equal(a, b)
        else:
            stored = _STORED[a.shape[-1] // (LATENT + ROPE)]
            _assert_close(a.view(stored), b.view(stored), tolerance)


def assert_found(query, queries, tolerance):
    """One of `queries` is like `query`. A lifted call decodes too, until it is dropped."""
    assert queries, "no decode was given a query"
    *first, last = queries
    for other in first:
        with contextlib.suppress(AssertionError):
            _assert_close(query, other, tolerance)
            return
    _assert_close(query, last, tolerance)


def _assert_close(a, b, tolerance):
    assert a.dtype == b.dtype
    x, y = a.double(), b.double()
    if tolerance is None:
        same = torch.equal(x.nan_to_num(), y.nan_to_num())
        assert same, f"differ by {(x - y).abs().max()}"
    else:
        if a.is_floating_point():  # what was rounded may be one step of its type off
            tolerance = max(tolerance, torch.finfo(a.dtype).eps)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


def fuse(module, spec, facts_of=None, quantized_query=False):
    """Passes 2 to 4, and 6, as `MLAFusionPass` runs them; what became of the layers."""
    facts_of = facts_of or Engine(spec, quantized_query).facts_of()

    def work(graph, record):
        record.layers = len(attention_calls(graph))
        pipeline.fuse(graph, facts_of, "reference", record)

    pipeline.contained(module.graph, Range(start=1, end=4), work)
    return report._records.pop()


def reasons(made):
    """The codes of the layers that were declined, of a record or of the result of one pass."""
    return [decline.code for decline in Counter(made.declined).elements()]
