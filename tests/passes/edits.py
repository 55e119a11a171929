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


def _k_scaled(module, factor=2.0):
    update, call = find(module, UPDATE), attention(module)
    k_pe = add(module, call, aten.mul.Tensor, update.args[1], factor)
    call.prepend(update)
    update.args = (update.args[0], k_pe, *update.args[2:])
    set_argument(call, k_pe=k_pe)


def _cosines_of_another_row(module):
    """Whatever positions of a batch may be equal."""
    lookup = find(module, aten.index.Tensor)
    readers = list(lookup.users)
    rows = [add(module, readers[0], aten.select.int, lookup, 0, i) for i in (1, 0, 2, 3, 4)]
    other = add(module, readers[0], aten.stack.default, rows)
    for reader in readers:
        reader.replace_input_with(lookup, other)


def _write_unrotated(module):
    update = find(module, UPDATE)
    update.args = (update.args[0], unrotated_k(module), *update.args[2:])


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


def _short_table(module, rope):
    """The table holds fewer angles than k_pe has pairs: part of it is rotated."""
    through(lambda module: find(module, IN_PLACE[rope]), "cos_sin_cache",
            aten.slice.Tensor, 1, 0, ROPE // 2)(module)  # fmt: skip


def _second_call(module, rope):
    """q and k_pe are rotated by two calls of the op."""
    call = find(module, IN_PLACE[rope])
    with module.graph.inserting_after(call):
        twin = module.graph.node_copy(call)
    read = next(u for u in call.users if u.target is operator.getitem and u.args[1] == 2)
    read.args = (twin, 2)


def _rotated_again(module):
    """vLLM's fused op writes the cache after q and k_pe were rotated in aten ops."""
    update, call = find(module, UPDATE), attention(module)
    q = add(module, update, aten.slice.Tensor, call.kwargs["q"], 2, NOPE, NOPE + ROPE)
    k_pe = add(module, update, aten.squeeze.dim, call.kwargs["k_pe"], 1)
    kv_c, _, name, dtype, scale = update.args
    positions, table = (node_named(module, name) for name in ("positions", "table"))
    op = torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default
    given = (positions, q, k_pe, kv_c, table, False, dtype, scale, name)
    with module.graph.inserting_before(update):
        values = tuple(node.meta["val"] for node in (update, q, k_pe))
        again = graphs.functionalized(module.graph, op, given, values)
    update.replace_all_uses_with(add(module, update, operator.getitem, again, 0))
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


def _part_scaled(module):
    """The rotated part of the query alone, which is put back into its place."""
    call = attention(module)
    q = call.kwargs["q"]
    part = add(module, call, aten.slice.Tensor, q, 2, NOPE, NOPE + ROPE)
    part = add(module, call, aten.mul.Tensor, part, factor_of_positions(module))
    q = add(module, call, aten.slice_scatter.default, q, part, 2, NOPE, NOPE + ROPE)
    set_argument(call, q=q)


def _mystery_write(module):
    call = attention(module)
    set_argument(call, kv_cache_dummy_dep=add(module, call, aten.neg.default, call.kwargs["k_pe"]))


def quantized_output(module):
    set_argument(attention(module), output_scale=node_named(module, "k_scale"))


_GPTJ, _NEOX, _DEEPSEEK = Spec("native"), Spec("native", is_neox=True), Spec("deepseek")
_C, _FLASHINFER, _AITER, _CAT = (Spec(rope) for rope in IN_PLACE)

# the reason it must decline for -> name -> (graph, edit)
_BY_REASON = {
    "unknown-rope": {
        "sin and cos swapped": (_GPTJ, _swap_sin_cos),
        "sin and cos swapped, NeoX": (_NEOX, _swap_sin_cos),
        "sin and cos swapped, DeepSeek": (_DEEPSEEK, _swap_sin_cos),
        "sign of q flipped": (_GPTJ, lambda m: _flip_sign(m, 0)),
        "sign of k_pe flipped": (_NEOX, lambda m: _flip_sign(m, 1)),
        "signs flipped, DeepSeek": (_DEEPSEEK, _flip_both_signs),
        "rotated part put elsewhere": (_GPTJ, _scatter_elsewhere),
        "other columns rotated": (_GPTJ, _rotate_other_columns),
        "k_pe at other positions": (_GPTJ, _k_at_other_positions),
        "cosines of another row": (Spec("native", dynamic=False), _cosines_of_another_row),
        "k_pe scaled": (_GPTJ, _k_scaled),
        "query rounded to integers": (_GPTJ, lambda m: _round_query(m, torch.int32)),
        "query rounded to fp8": (_DEEPSEEK, lambda m: _round_query(m, torch.float8_e4m3fn)),
        "inverse rotation": (_C, _set_op_argument("vllm_c", inverse=True)),
        "first columns kept": (_C, _set_op_argument("vllm_c", rope_dim_offset=4)),
        "offsets": (_AITER, lambda m: set_argument(find(m, IN_PLACE["aiter"]), offsets=
                                                   node_named(m, "positions"))),
        "other head size": (_FLASHINFER, _set_op_argument("flashinfer", head_size=ROPE // 2)),
        "short table": (_FLASHINFER, lambda m: _short_table(m, "flashinfer")),
        "short table, fused update": (_CAT, lambda m: _short_table(m, "cat_fused")),
        "two calls": (_FLASHINFER, lambda m: _second_call(m, "flashinfer")),
        "two calls, fused update": (_CAT, lambda m: _second_call(m, "cat_fused")),
        "in-place result put elsewhere": (_FLASHINFER, _scatter_elsewhere),
        "other columns given to the op": (_AITER, _rotate_other_columns),
        "part of the query scaled": (_GPTJ, _part_scaled),
        "k_pe scaled by position": (_GPTJ, lambda m: _k_scaled(m, factor_of_positions(m))),
        "op with positions": (Spec("nope"), _mystery_rope),
    },
    "cache-update": {
        "unrotated k_pe written": (_GPTJ, _write_unrotated),
        "unrotated k_pe written, in place": (_C, _write_unrotated),
        "attention to unrotated k_pe": (
            _NEOX, lambda m: set_argument(attention(m), k_pe=unrotated_k(m))
        ),
        "attention to other kv_c": (_GPTJ, through(attention, "kv_c_normed", aten.mul.Tensor, 2.0)),
        "rotated twice": (_GPTJ, _rotated_again),
        "unknown cache update": (_GPTJ, _mystery_write),
    },
    "computed-angles": {
        "computed angles": (Spec("computed"), nothing),
        "computed angles, NeoX": (Spec("computed", is_neox=True), nothing),
        "computed angles, complex": (Spec("computed_complex"), nothing),
    },
    "scaled-query": {
        "query scaled by head": (_GPTJ, lambda m: scale_query(m, factor_of_columns(m)[0])),
        "query scaled by channel": (_FLASHINFER, lambda m: scale_query(m, factor_of_columns(m)[1])),
        "query scaled twice": (_GPTJ, lambda m: scale_query(m, *[factor_of_positions(m)] * 2)),
        "query scaled in fp64": (
            _GPTJ, lambda m: scale_query(m, factor_of_positions(m, torch.float64))
        ),
        "scaled query rounded": (
            _NEOX, lambda m: scale_query(m, factor_of_positions(m), dtype=torch.float16)
        ),
        "query scaled by a number": (_NEOX, lambda m: scale_query(m, 1.5)),
    },
    "quantized-output": {"quantized output": (_GPTJ, quantized_output)},
    "attention-argument": {
        "query replicated across ranks": (_GPTJ, lambda m: set_argument(
            attention(m), q_dcp_replicated=attention(m).kwargs["q"])),
    },
    "shape": {
        "query of two dimensions": (_GPTJ, through(attention, "q", aten.flatten.using_ints, 1)),
    },
}  # fmt: skip
NEAR_MISSES = {name: reason for reason, cases in _BY_REASON.items() for name in cases}


def near_miss(name):
    """The graph of a near miss, its spec, and the reason it must decline for."""
    reason = NEAR_MISSES[name]
    spec, edit = _BY_REASON[reason][name]
    module = graphs.build(spec)
    edit(module)
    module.graph.lint()
    return module, spec, reason
