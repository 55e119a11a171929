"""The products of a model's layers: of attention, a dense MLP, shared experts and the router."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mla_fusion.ops import Product
from mla_fusion.projections.measured import chosen
from mla_fusion.projections.plans import GROUP, MAX_TOKENS


def shapes_of(config: Mapping[str, Any], ranks: int, wide_router: bool = False) -> list[Product]:
    """The products of a model's layers on one of `ranks`, each once, by the sizes that its config
    gives as numbers. wide_router: the router's weights are fp32."""

    def get(*names: str) -> int:
        given = (config.get(name) for name in names)
        return next((size for size in given if isinstance(size, int) and size > 0), 0)

    hidden, latent = get("hidden_size"), get("q_lora_rank")
    heads = get("num_attention_heads") // ranks
    key = get("kv_lora_rank") + get("qk_rope_head_dim")
    query = heads * (get("qk_nope_head_dim") + get("qk_rope_head_dim"))
    found = [Product(heads * get("v_head_dim"), (hidden,))]
    if latent:
        found += [Product(hidden, (latent + key,)), Product(latent, (query,))]
    else:
        found += [Product(hidden, sizes) for sizes in ((query, key), (query,), (key,))]
    shared = get("moe_intermediate_size") * get("n_shared_experts", "num_shared_experts")
    for inner in (get("intermediate_size") // ranks, shared // ranks):
        found += [Product(hidden, (2 * inner,)), Product(inner, (hidden,))]
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping) and quantized.get("weight_block_size") == [GROUP, GROUP]:
        # Of block fp8 no launch has two weights.
        found = [dataclasses.replace(each, bits=8) for each in found if len(each.sizes) == 1]
    experts = get("n_routed_experts", "num_experts")
    found += [Product(hidden, (experts,), 32 if wide_router else 16)]
    return [each for each in dict.fromkeys(found) if each.k and all(each.sizes)]


def faster(name: str, shapes: list[Product]) -> dict[Product, int]:
    """The products that this library computes on a GPU, with the most tokens of each. Two products
    that are one launch are not named apart."""
    most = {
        shape: max((n for n in range(1, MAX_TOKENS + 1) if chosen(name, shape, n)), default=0)
        for shape in shapes
    }
    pairs = [shape for shape in shapes if len(shape.sizes) > 1 and most[shape]]
    joined = {Product(pair.k, (size,), pair.bits) for pair in pairs for size in pair.sizes}
    return {shape: n for shape, n in most.items() if n and shape not in joined}
