"""Single steps of one MLA layer through vLLM's ROCm backend, before and after the passes.

The layer, its metadata builder and its backend are vLLM's own. The graph is traced from vLLM's code
(tests/passes/graphs.py) in the real widths.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.rocm import imitation
from tests.step import forward_pass

HIDDEN, NOPE, ROPE, LATENT, VALUE, MAX_LENGTH = 64, 128, 64, 512, 128, 256
BLOCKS, BLOCK = 96, 16
NAME = "model.layers.0.attn"


@dataclass(frozen=True)
class Batch:
    """The requests of a step, decodes first.

    Attributes:
        requests: (tokens in the cache, new tokens) of each.
        rows: rows of the graph beyond the new tokens, which have no slot.
        dummies: requests without tokens that pad a full CUDA graph; vLLM then counts the padded
            rows as tokens.
        drafts: how many tokens the engine speculates.
        shared: blocks at the beginning that all requests share, as prefix caching leaves them.
    """

    requests: tuple[tuple[int, int], ...]
    rows: int = 0
    dummies: int = 0
    drafts: int = 0
    shared: int = 0

    @property
    def live(self):
        return sum(new for _, new in self.requests)


BATCHES = {
    "decode": Batch(((70, 1), (4, 1), (40, 1))),
    "one token": Batch(((9, 1),)),
    "padded": Batch(((70, 1), (4, 1)), rows=3),
    "full graph": Batch(((70, 1), (4, 1)), rows=2, dummies=2),
    "mixed": Batch(((70, 1), (4, 1), (0, 5))),
    "prefill": Batch(((0, 3), (0, 2)), drafts=1),
    "2 tokens": Batch(((70, 2), (4, 2)), drafts=1),
    "4 tokens": Batch(((70, 4), (9, 4)), drafts=3),
    "4 tokens, full graph": Batch(((70, 4), (9, 4)), rows=4, dummies=1, drafts=3),
    "4 tokens, mixed": Batch(((70, 4), (9, 4), (0, 6)), drafts=3),
    "33 requests": Batch(tuple((3 + i, 1) for i in range(33))),
}
# For each number of drafts, what else meets the plan of attention=aiter.
PLANNED = BATCHES | {
    "shared prefix": Batch(((70, 1), (69, 1), (40, 1)), shared=2),
    "1 of 2 tokens": Batch(((70, 1), (4, 1)), drafts=1),
    "2 tokens, full graph": Batch(((70, 2), (9, 2)), rows=4, dummies=2, drafts=1),
    "3 tokens": Batch(((70, 3), (9, 3), (3, 3)), drafts=2),
    "3 tokens, full graph": Batch(((70, 3), (9, 3)), rows=3, dummies=1, drafts=2),
    "2 of 3 tokens": Batch(((70, 2), (9, 2)), drafts=2),
    "4 tokens, shared prefix": Batch(((70, 4), (69, 4)), drafts=3, shared=2),
    "3 of 4 tokens": Batch(((70, 3), (9, 3)), drafts=3),
    "1 of 4 tokens, full graph": Batch(((70, 1), (4, 1)), rows=2, dummies=2, drafts=3),
}


@dataclass(frozen=True)
class Case:
    """One step: the heads of the layer, its cache ("auto" or "fp8"), the batch by name, and the
    packed forms of its weights that are switched on (`imitation.switch_products`)."""

    heads: int
    cache: str
    batch: str
    products: str = ""

    @property
    def of(self):
        return PLANNED[self.batch]

    @property
    def decode_only(self):
        return all(cached for cached, _ in self.of.requests)


class Backend:
    """One MLA layer of vLLM with its metadata builder and a filled cache."""

    def __init__(self, heads, cache, products, drafts, full_graphs, folder):
        from vllm.config import CUDAGraphMode, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.attention import MLAAttention
        from vllm.model_executor.layers.linear import ColumnParallelLinear
        from vllm.utils.torch_utils import set_default_torch_dtype

        from tests.models import DEEPSEEK_V2, write

        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
        sizes["hidden_size"] = 64 * heads  # transformers wants a multiple
        speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
        self.config = EngineArgs(
            model=write(Path(folder), {**DEEPSEEK_V2, **sizes}),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=64,
            block_size=BLOCK,  # vLLM's default is another where the CPU has AMX
            kv_cache_dtype=cache,
            speculative_config=speculative if drafts else None,
        ).create_engine_config()
        # vLLM compiles the quantization of the query otherwise, a third of the time of all steps.
        self.config.compilation_config.backend = "eager"
        imitation.switch_products(products)
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.bfloat16):
            if not parallel_state.model_parallel_is_initialized():
                meeting = f"file://{folder}/processes"
                parallel_state.init_distributed_environment(1, 0, meeting, 0, backend="gloo")
                parallel_state.initialize_model_parallel(1, 1)
            projection = ColumnParallelLinear(LATENT, heads * (NOPE + VALUE), bias=False)
            self.layer = MLAAttention(
                heads, (NOPE + ROPE) ** -0.5, NOPE, ROPE, VALUE, None, LATENT, projection,
                cache_config=self.config.cache_config, prefix=NAME,
            )  # fmt: skip
        generator = torch.Generator().manual_seed(heads)
        weight = torch.randn(projection.weight.shape, generator=generator) * LATENT**-0.5
        projection.weight.data.copy_(weight)
        projection.quant_method.process_weights_after_loading(projection)
        self.layer.process_weights_after_loading(torch.bfloat16)
        self.layer._k_scale.fill_(0.5)
        self.layer._q_scale.fill_(0.25)
        spec = self.layer.get_kv_cache_spec(self.config)
        backend = self.layer.attn_backend
        assert backend.get_name() == "ROCM_AITER_MLA"
        if full_graphs:  # the builder then copies into buffers of fixed addresses
            self.config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        with set_current_vllm_config(self.config):
            self.builder = backend.get_builder_cls()(spec, [NAME], self.config, torch.device("cpu"))
        entries = torch.randn((BLOCKS, BLOCK, LATENT + ROPE), generator=generator)
        self.stored = spec.dtype if cache == "auto" else imitation.fp8_of_vllm()
        self.cache = entries.to(self.stored).view(spec.dtype)

    def metadata(self, batch, slots, tables):
        """The metadata of a batch, by vLLM's builder."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        new = [n for _, n in batch.requests] + [0] * batch.dummies
        lengths = [c + n for c, n in batch.requests] + [0] * batch.dummies
        start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        tokens = batch.live + (batch.rows if batch.dummies else 0)
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=start, query_start_loc_cpu=start, seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens, num_reqs=len(new), num_actual_tokens=tokens,
                max_query_len=max(new), max_seq_len=max(lengths), block_table_tensor=tables,
                slot_mapping=slots,
            ),
        )  # fmt: skip


def places(batch):
    """(slots of all rows, positions, block tables): each request has blocks of its own, after
    those that all share."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    slots, positions, tables = [], [], []
    prefix = [free.pop() for _ in range(batch.shared)]
    for cached, new in (*batch.requests, *[(0, 0)] * batch.dummies):
        own = prefix + [free.pop() for _ in range(-(-(cached + new) // BLOCK) - batch.shared)]
        tables.append(own + [0] * (MAX_LENGTH // BLOCK - len(own)))
        for position in range(cached, cached + new):
            slots.append(own[position // BLOCK] * BLOCK + position % BLOCK)
            positions.append(position)
    slots += [-1] * batch.rows
    positions += [0] * batch.rows
    return torch.tensor(slots), torch.tensor(positions), torch.tensor(tables, dtype=torch.int32)


def graph(case):
    """The layer's graph in the real widths, and what it was built from."""
    from tests.passes import graphs

    sizes = {"HIDDEN": HIDDEN, "NOPE": NOPE, "ROPE": ROPE, "LATENT": LATENT, "VALUE": VALUE}
    for name, value in {**sizes, "HEADS": case.heads, "MAX_POSITION": MAX_LENGTH}.items():
        setattr(graphs, name, value)
    spec = graphs.Spec("vllm_c", dtype=torch.bfloat16, kv_cache_dtype=case.cache)
    key = case.heads, case.cache
    if key not in _traced:
        graphs._trace.cache_clear()  # of other widths
        _traced[key] = graphs.build(spec)
    return graphs.copy(_traced[key]), spec


_traced = {}


def fuse(module, layer, provider, attention="auto", query_len=1):
    """The passes on a graph; the record of what they did."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    from mla_fusion import report
    from mla_fusion.config import eligibility
    from mla_fusion.passes import pipeline
    from mla_fusion.patterns.site import attention_calls

    record = report.RangeReport((1, 64), layers=len(attention_calls(module.graph)))
    facts = eligibility.facts(layer, provider, torch.bfloat16, attention, query_len)
    pipeline.fuse(module.graph, lambda name: facts, provider, record)
    with pass_context(Range(start=1, end=64)):
        pipeline.LastStep(None)(module.graph)
    return record


def run(module, spec, backend, batch):
    """One step on a fresh cache: the output, and the bytes of the cache [slots, entry].

    Raises:
        AssertionError: bytes outside of the slots of the batch changed.
    """
    from tests.passes import fake_engine, graphs

    slots, positions, tables = places(batch)
    values = graphs.inputs(spec, len(slots)) | {"positions": positions}
    backend.layer.kv_cache = backend.cache.clone()
    metadata = backend.metadata(batch, slots, tables)
    with forward_pass({NAME: backend.layer}, metadata, slots):
        outputs = fake_engine.execute(module, values)
    before, cache = (
        x.flatten(0, 1).view(torch.uint8) for x in (backend.cache, backend.layer.kv_cache)
    )
    elsewhere = torch.ones(len(cache), dtype=torch.bool)
    elsewhere[slots[slots >= 0]] = False
    assert torch.equal(before[elsewhere], cache[elsewhere]), "bytes of other slots changed"
    return outputs[0][: batch.live].clone(), cache
