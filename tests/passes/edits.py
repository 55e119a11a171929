"""Edits of the graphs of `graphs.build`: near misses, and what makes a layer decline.

Each near miss is a graph that looks like a spelling the patterns know and computes something
else, or computes it where it may not be moved. `NEAR_MISSES` names the reason it must decline for.
"""

import operator

import torch
from torch import fx
from torch._guards import detect_fake_mode

from tests.passes import graphs
from tests.passes.graphs import NOPE, ROPE, Spec, find, find_all

aten, prims = torch.ops.aten, torch.ops.prims

ATTENTION = "vllm::unified_mla_attention_with_output"
UPDATE = "vllm::unified_mla_kv_cache_update"
CAT_FUSED = "vllm::fused_rope_unified_mla_kv_cache_update"
IN_PLACE = {
    "vllm_c": "_C::rotary_embedding",
    "flashinfer": "vllm::flashinfer_rotary_embedding",
    "aiter": "vllm::rocm_aiter_triton_rotary_embedding",
    "cat_fused": CAT_FUSED,
}


def add(module, before, target, *args):
    """A new call in front of `before`, with fake metadata; it settles no number of tokens."""
    with module.graph.inserting_before(before):
        node = module.graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta["val"] for n in module.graph.nodes if "val" in n.meta])
    assert mode is not None and mode.shape_env is not None
    with mode, mode.shape_env.suppress_guards():
        node.meta["val"] = target(*values)
    return node


def node_named(module, name):
    """The node of that name."""
    return next(n for n in module.graph.nodes if n.name == name)


def attention(module, layer=0):
    """The attention call of a layer."""
    return find(module, ATTENTION, layer)


def set_argument(node, **values):
    """Replace keyword arguments of a functionalized call."""
    node.kwargs = {**node.kwargs, **values}


def through(call, name, target, *args):
    """An edit: an argument of the call that `call` finds is read through an op."""

    def edit(module):
        node = call(module)
        set_argument(node, **{name: add(module, node, target, node.kwargs[name], *args)})

    return edit


def also_return(module, *nodes):
    """Append values to what the graph returns."""
    output = module.graph.output_node()
    output.args = ((*output.args[0], *nodes),)  # type: ignore[misc]


def read_also(module, node):
    """Give `node` one more reader whose result leaves the graph."""
    also_return(module, add(module, module.graph.output_node(), aten.neg.default, node))


def unrotated_k(module):
    """k_pe [T, 1, R] as it left the projection, in front of the cache update."""
    split = next(n for n in find_all(module, aten.split_with_sizes.default) if n.args[1] == [16, 8])
    before = find(module, UPDATE)
    k_pe = add(module, before, operator.getitem, split, 1)
    return add(module, before, aten.unsqueeze.default, k_pe, 1)


def _swap_sin_cos(module):
    for half in list(find(module, aten.split.Tensor).users):
        half.args = (half.args[0], 1 - half.args[1])  # type: ignore[operator]


def _flip_sign(module, index):
    find(module, aten.sub.Tensor, index).target = aten.add.Tensor


def _flip_both_signs(module):
    for node in find_all(module, aten.neg.default):
        node.replace_all_uses_with(node.args[0])


def _scatter_elsewhere(module):
    scatter = find(module, aten.slice_scatter.default)
    scatter.args = (*scatter.args[:3], NOPE - ROPE, NOPE)


def _rotate_other_columns(module):
    for node in find_all(module, aten.slice.Tensor):
        if node.args[1:3] == (2, NOPE):
            node.args = (node.args[0], 2, 0, ROPE)


def _k_at_other_positions(module):
    """cos and sin of k_pe are looked up at positions + 1."""
    lookup, split = find(module, aten.index.Tensor), find(module, aten.split.Tensor)
    before = split.next
    later = add(module, before, aten.add.Tensor, module.graph.find_nodes(op="placeholder")[0], 0)
    later.args = (node_named(module, "positions"), 1)
    later.meta["val"] = node_named(module, "positions").meta["val"]
    rows = add(module, before, aten.index.Tensor, lookup.args[0], [later])
    halves = add(module, before, aten.split.Tensor, rows, ROPE // 2, -1)
    for old in list(split.users):
        new = add(module, before, operator.getitem, halves, old.args[1])
        last = [u for u in old.users if u.target is aten.unsqueeze.default][-1]
        last.replace_input_with(old, new)


def _k_scaled(module):
    update, call = find(module, UPDATE), attention(module)
    k_pe = update.args[1]
    twice = add(module, update, aten.mul.Tensor, k_pe, 2.0)
    update.args = (update.args[0], twice, *update.args[2:])
    set_argument(call, k_pe=twice)


def _write_unrotated(module):
    update = find(module, UPDATE)
    update.args = (update.args[0], unrotated_k(module), *update.args[2:])


def _attend_to_unrotated(module):
    set_argument(attention(module), k_pe=unrotated_k(module))


def _round_query(module, dtype):
    """The query is rounded to `dtype` before it is rotated."""
    for node in find_all(module, aten.slice.Tensor):
        if node.args[1:3] == (2, NOPE) and aten.copy.default not in {u.target for u in node.users}:
            users = list(node.users)
            rounded = add(module, node.next, prims.convert_element_type.default, node, dtype)
            back = add(module, rounded.next, prims.convert_element_type.default, rounded,
                       node.meta["val"].dtype)  # fmt: skip
            for user in users:
                user.replace_input_with(node, back)


def _set_op_argument(rope, **values):
    return lambda module: set_argument(find(module, IN_PLACE[rope]), **values)


def _offsets(module):
    set_argument(find(module, IN_PLACE["aiter"]), offsets=node_named(module, "positions"))


def _short_table(rope):
    """The table holds fewer angles than k_pe has pairs: part of it is rotated."""

    def edit(module):
        call = find(module, IN_PLACE[rope])
        table = node_named(module, "table")
        half = add(module, call, aten.slice.Tensor, table, 1, 0, ROPE // 2)
        set_argument(call, cos_sin_cache=half)

    return edit


def _second_call(rope):
    """q and k_pe are rotated by two calls of the op."""

    def edit(module):
        call = find(module, IN_PLACE[rope])
        with module.graph.inserting_after(call):
            twin = module.graph.node_copy(call)
        read = next(u for u in call.users if u.target is operator.getitem and u.args[1] == 2)
        read.args = (twin, 2)

    return edit


def _rotated_again(module):
    """vLLM's fused op writes the cache after q and k_pe were rotated in aten ops."""
    update, call = find(module, UPDATE), attention(module)
    q = add(module, update, aten.slice.Tensor, call.kwargs["q"], 2, NOPE, NOPE + ROPE)
    k_pe = add(module, update, aten.squeeze.dim, call.kwargs["k_pe"], 1)
    kv_c, _, name, dtype, scale = update.args
    with module.graph.inserting_before(update):
        again = module.graph.call_function(
            torch.ops.higher_order.auto_functionalized,
            (torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default,),
            {
                "positions": node_named(module, "positions"),
                "q_pe": q,
                "k_pe": k_pe,
                "kv_c": kv_c,
                "cos_sin_cache": node_named(module, "table"),
                "is_neox": False,
                "kv_cache_dtype": dtype,
                "kv_cache_scale": scale,
                "layer_name": name,
            },
        )
        again.meta["val"] = (update.meta["val"], q.meta["val"], k_pe.meta["val"])
        written = module.graph.call_function(operator.getitem, (again, 0))
        written.meta["val"] = update.meta["val"]
    update.replace_all_uses_with(written)
    module.graph.erase_node(update)


def _mystery_rope(module):
    """An op that takes positions makes the query."""
    call = attention(module)
    hidden = node_named(module, "hidden").meta["val"]
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        positions = module.graph.placeholder("positions")
    positions.meta["val"] = hidden.new_empty(hidden.shape[0], dtype=torch.int64)
    rotate = torch.ops.mla_fusion_tests.mystery_rope.default
    set_argument(call, q=add(module, call, rotate, call.kwargs["q"], positions))


def nothing(module):
    """The graph is a near miss as it was traced."""


def factor_of_positions(module, dtype=torch.float32):
    """A factor of each token, [T, 1, 1], in front of the attention."""
    call = attention(module)
    number = add(module, call, prims.convert_element_type.default,
                 node_named(module, "positions"), dtype)  # fmt: skip
    factor = add(module, call, aten.log1p.default, number)
    for _ in range(2):
        factor = add(module, call, aten.unsqueeze.default, factor, -1)
    return factor


def factor_of_columns(module):
    """A factor of each head or of each channel: |q| of a part of q, [T, H, 1] and [P + R]."""
    call = attention(module)
    q = call.kwargs["q"]
    head = add(module, call, aten.slice.Tensor, q, 2, 0, 1)
    channel = add(module, call, aten.select.int, q, 0, 0)
    channel = add(module, call, aten.select.int, channel, 0, 0)
    return [add(module, call, aten.abs.default, part) for part in (head, channel)]


def scale_query(module, *factors, dtype=None):
    """The query of the attention is multiplied by `factors` and put back into its type.

    Or it is rounded to `dtype` before that.
    """
    call = attention(module)
    q = call.kwargs["q"]
    own = q.meta["val"].dtype
    for factor in factors:
        q = add(module, call, aten.mul.Tensor, q, factor)
    for wanted in (dtype, own):
        if wanted not in (None, q.meta["val"].dtype):
            q = add(module, call, prims.convert_element_type.default, q, wanted)
    set_argument(call, q=q)


def _scaled_twice(module):
    scale_query(module, *[factor_of_positions(module)] * 2)


def _scaled_in_fp64(module):
    scale_query(module, factor_of_positions(module, torch.float64))


def _scaled_and_rounded(module):
    scale_query(module, factor_of_positions(module), dtype=torch.float16)


def _part_scaled(module):
    """The rotated part of the query alone, which is put back into its place."""
    call = attention(module)
    q = call.kwargs["q"]
    part = add(module, call, aten.slice.Tensor, q, 2, NOPE, NOPE + ROPE)
    part = add(module, call, aten.mul.Tensor, part, factor_of_positions(module))
    q = add(module, call, aten.slice_scatter.default, q, part, 2, NOPE, NOPE + ROPE)
    set_argument(call, q=q)


def _k_scaled_by_position(module):
    update, call = find(module, UPDATE), attention(module)
    factor = factor_of_positions(module)
    k_pe = add(module, call, aten.mul.Tensor, call.kwargs["k_pe"], factor)
    call.prepend(update)
    update.args = (update.args[0], k_pe, *update.args[2:])
    set_argument(call, k_pe=k_pe)


def _mystery_write(module):
    call = attention(module)
    set_argument(call, kv_cache_dummy_dep=add(module, call, aten.neg.default, call.kwargs["k_pe"]))


def quantized_output(module):
    set_argument(attention(module), output_scale=node_named(module, "k_scale"))


def _replicated_query(module):
    call = attention(module)
    set_argument(call, q_dcp_replicated=call.kwargs["q"])


_GPTJ, _NEOX = Spec("native"), Spec("native", is_neox=True)
_DEEPSEEK = Spec("deepseek")

# name -> (graph, edit, the reason it must decline for)
NEAR_MISSES = {
    "sin and cos swapped": (_GPTJ, _swap_sin_cos, "unknown-rope"),
    "sin and cos swapped, NeoX": (_NEOX, _swap_sin_cos, "unknown-rope"),
    "sin and cos swapped, DeepSeek": (_DEEPSEEK, _swap_sin_cos, "unknown-rope"),
    "sign of q flipped": (_GPTJ, lambda m: _flip_sign(m, 0), "unknown-rope"),
    "sign of k_pe flipped": (_NEOX, lambda m: _flip_sign(m, 1), "unknown-rope"),
    "signs flipped, DeepSeek": (_DEEPSEEK, _flip_both_signs, "unknown-rope"),
    "rotated part put elsewhere": (_GPTJ, _scatter_elsewhere, "unknown-rope"),
    "other columns rotated": (_GPTJ, _rotate_other_columns, "unknown-rope"),
    "k_pe at other positions": (_GPTJ, _k_at_other_positions, "unknown-rope"),
    "k_pe scaled": (_GPTJ, _k_scaled, "unknown-rope"),
    "unrotated k_pe written": (_GPTJ, _write_unrotated, "cache-update"),
    "attention to unrotated k_pe": (_NEOX, _attend_to_unrotated, "cache-update"),
    "query rounded to integers": (_GPTJ, lambda m: _round_query(m, torch.int32), "unknown-rope"),
    "query rounded to fp8": (
        _DEEPSEEK, lambda m: _round_query(m, torch.float8_e4m3fn), "unknown-rope"
    ),
    "inverse rotation": (Spec("vllm_c"), _set_op_argument("vllm_c", inverse=True), "unknown-rope"),
    "first columns kept": (
        Spec("vllm_c"), _set_op_argument("vllm_c", rope_dim_offset=4), "unknown-rope"
    ),
    "offsets": (Spec("aiter"), _offsets, "unknown-rope"),
    "other head size": (
        Spec("flashinfer"), _set_op_argument("flashinfer", head_size=ROPE // 2), "unknown-rope"
    ),
    "short table": (Spec("flashinfer"), _short_table("flashinfer"), "unknown-rope"),
    "short table, fused update": (Spec("cat_fused"), _short_table("cat_fused"), "unknown-rope"),
    "two calls": (Spec("flashinfer"), _second_call("flashinfer"), "unknown-rope"),
    "two calls, fused update": (Spec("cat_fused"), _second_call("cat_fused"), "unknown-rope"),
    "in-place result put elsewhere": (Spec("flashinfer"), _scatter_elsewhere, "unknown-rope"),
    "other columns given to the op": (Spec("aiter"), _rotate_other_columns, "unknown-rope"),
    "unrotated k_pe written, in place": (Spec("vllm_c"), _write_unrotated, "cache-update"),
    "rotated twice": (_GPTJ, _rotated_again, "cache-update"),
    "computed angles": (Spec("computed"), nothing, "computed-angles"),
    "computed angles, NeoX": (Spec("computed", is_neox=True), nothing, "computed-angles"),
    "computed angles, complex": (Spec("computed_complex"), nothing, "computed-angles"),
    "query scaled by head": (
        _GPTJ, lambda m: scale_query(m, factor_of_columns(m)[0]), "scaled-query"
    ),
    "query scaled by channel": (
        Spec("flashinfer"), lambda m: scale_query(m, factor_of_columns(m)[1]), "scaled-query"
    ),
    "query scaled twice": (_GPTJ, _scaled_twice, "scaled-query"),
    "query scaled in fp64": (_GPTJ, _scaled_in_fp64, "scaled-query"),
    "scaled query rounded": (_NEOX, _scaled_and_rounded, "scaled-query"),
    "query scaled by a number": (_NEOX, lambda m: scale_query(m, 1.5), "scaled-query"),
    "part of the query scaled": (_GPTJ, _part_scaled, "unknown-rope"),
    "k_pe scaled by position": (_GPTJ, _k_scaled_by_position, "unknown-rope"),
    "op with positions": (Spec("nope"), _mystery_rope, "unknown-rope"),
    "attention to other kv_c": (
        _GPTJ, through(attention, "kv_c_normed", aten.mul.Tensor, 2.0), "cache-update"
    ),
    "unknown cache update": (_GPTJ, _mystery_write, "cache-update"),
    "quantized output": (_GPTJ, quantized_output, "quantized-output"),
    "query replicated across ranks": (_GPTJ, _replicated_query, "attention-argument"),
    "query of two dimensions": (
        _GPTJ, through(attention, "q", aten.flatten.using_ints, 1), "shape"
    ),
}  # fmt: skip


def near_miss(name):
    """The graph of a near miss, its spec, and the reason it must decline for."""
    spec, edit, reason = NEAR_MISSES[name]
    module = graphs.build(spec)
    edit(module)
    module.graph.lint()
    return module, spec, reason
