"""Steps of the grammar around the RoPE and the attention: what the rules of the patterns must see.

An alias that is read later, a token dimension that is taken apart, a value that is read twice or
not at all, a function of the output's scale, a second write of the cache.
"""

import operator

import torch

from tests.passes import edits

aten, prims = torch.ops.aten, torch.ops.prims
END = (1 << 63) - 1


def _tuple(x):
    """A Python function, of which nothing is known."""
    return (x, 1)


def _first(pair):
    return pair[0]


def _columns(x):
    return x[..., :2]


# Calls, one after the other, whose last one shows memory of a tensor.
ALIASES = (
    [(aten.view.dtype, torch.uint8), (aten.view.dtype, "its type")],
    [(aten.as_strided.default, [2, 2], [1, 1])], [(aten.detach.default,)], [(aten.alias.default,)],
    [(prims.view_of.default,)], [(aten.unfold.default, -1, 2, 2)], [(aten.diagonal.default,)],
    [(aten.unsqueeze.default, 0), (aten.squeeze.default,)],
    [(aten.unbind.int, 1), (operator.getitem, 1)],
    [(aten.split.Tensor, 4, -1), (operator.getitem, 1)],
    [(aten.hsplit.int, 2), (operator.getitem, 0)],
    [(aten.chunk.default, 2, -1), (operator.getitem, 1)],
    [(aten.tensor_split.sections, 2, -1), (operator.getitem, 1)],
    [(aten.narrow.default, -1, 2, 3)], [(aten.swapaxes.default, 0, 1)], [(aten.movedim.int, 0, 1)],
    [(aten.mT.default,)], [(aten.unflatten.int, -1, [-1, 2])], [(aten.flatten.using_ints, 0, 1)],
    [(aten.view_as.default, "itself")], [(aten.expand_as.default, "itself")],
    [(aten.contiguous.default,)], [(aten.to.dtype, torch.float32)], [(aten.ravel.default,)],
    [(aten.select.int, -1, 1)], [(aten.slice.Tensor, -1, 2, 4)], [(aten.permute.default, [1, 0])],
    [(_columns,)], [(_tuple,), (_first,)],
)  # fmt: skip
READS = (aten.neg.default, aten.clone.default, aten.relu.default, aten.sum.default)


def is_float(node):
    """Whether the node is a tensor of floating-point numbers with at least one dimension."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dim() > 0


def behind(module, node, *calls):
    """The last of `calls`, (op, further arguments) each, which read each other behind `node`."""
    stands = {"itself": node, "its type": node.meta["val"].dtype}
    for target, *args in calls:
        before = node.next
        while before.op == "placeholder":
            before = before.next
        args = [stands.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        node = edits.add(module, before, target, node, *args)
    return node


def alias(module, node, pick):
    """An alias of a node, or an alias of that, is read at the end, at once, or never."""
    if not is_float(node):
        return
    pick, when = divmod(pick, 4)
    shown = behind(module, node, *ALIASES[pick % len(ALIASES)])
    if pick // len(ALIASES) and isinstance(shown.meta["val"], torch.Tensor):
        shown = behind(module, shown, *ALIASES[pick // len(ALIASES) * 5 % len(ALIASES)])
    end = module.graph.output_node()
    if when == 0:
        edits.also_return(module, shown)
    elif when < 3:
        before = shown.next if when == 1 else end
        edits.also_return(module, edits.add(module, before, READS[pick % 4], shown))


def cast(module, x, dtype):
    """`x` in another type, behind it."""
    return behind(module, x, (prims.convert_element_type.default, dtype))


def kept(module, x, dtype, how=0):
    """`x` as it is read from a buffer of another type, in its own: copied, or scattered into it."""
    own = x.meta["val"].dtype
    buffer = behind(module, cast(module, x, dtype), (aten.abs.default,))
    scattered = (aten.slice_scatter.default, x, -1, 0, END)
    written = behind(module, buffer, scattered if how else (aten.copy.default, x))
    return written if written.meta["val"].dtype == own else cast(module, written, own)


def read(module, node, pick):
    """A node has one more reader, behind it or at the end, whose result leaves the graph or not."""
    if is_float(node):
        before = node.next if pick & 4 else module.graph.output_node()
        result = edits.add(module, before, READS[pick % 4], node)
        if not pick & 8:
            edits.also_return(module, result)


def put_between(module, node, pick, make):
    """Chosen readers of `node` read what `make` puts behind it, given `node`, in its place."""
    users = list(node.users)
    new = make(node)
    for index, user in enumerate(users):
        if pick >> index & 1 or len(users) == 1:
            user.replace_input_with(node, new)


def _twin(module, node, pick):
    """Another value of the shape and the type of `node`, from in front of it if there is one."""
    value, found = node.meta["val"], []
    for other in module.graph.nodes:
        if other is node:
            break
        known = other.meta.get("val")
        if is_float(other) and known.dtype == value.dtype and str(known.shape) == str(value.shape):
            found.append(other)
    if found and pick % 4:
        return found[-1 - pick % len(found)]
    return edits.add(module, node.next, aten.mul.Tensor, node, 2.0)


def _joined(module, x, other, at, scattered=False):
    """Rows of two values: those of `x` in front of `at`, and of `other` from it on."""
    tail = edits.add(module, max(x, other).next, aten.slice.Tensor, other, 0, at, END)
    if scattered:
        return edits.add(module, tail.next, aten.slice_scatter.default, x, tail, 0, at, END)
    head = edits.add(module, tail.next, aten.slice.Tensor, x, 0, 0, at)
    return edits.add(module, head.next, aten.cat.default, [head, tail], 0)


def _times_tokens(module, x):
    """Times T / 3: nothing, for three tokens."""
    size = edits.add(module, x.next, aten.sym_size.int, x, 0)
    product = edits.add(module, size.next, aten.mul.Tensor, x, size)
    return behind(module, product, (aten.mul.Tensor, 1 / 3))


def _one_row(module, x, index):
    row = behind(module, x, (aten.select.int, 0, index), (aten.unsqueeze.default, 0))
    return edits.add(module, row.next, aten.add.Tensor, x, row)


def _has_tokens(node):
    hidden = next(n for n in node.graph.nodes if n.name == "hidden")
    value = node.meta.get("val")
    rows = is_float(node) and str(value.shape[0]) == str(hidden.meta["val"].shape[0])
    return rows and value.dim() > 1


def some_rows(module, node, pick):
    """A value of which some rows are another's, or depend on the number of tokens or on a row."""
    if _has_tokens(node):
        at, which, pick = pick % 4 + 1, pick // 4 % 6, pick // 24
        made = {
            0: lambda x: _joined(module, x, x, at),
            1: lambda x: _joined(module, x, _twin(module, x, pick), at),
            2: lambda x: _joined(module, x, _twin(module, x, pick), -at),
            3: lambda x: _joined(module, x, _twin(module, x, pick), at, scattered=True),
            4: lambda x: _times_tokens(module, x),
            5: lambda x: _one_row(module, x, at % 2 - 1),
        }
        put_between(module, node, pick, made[which])


def all_rows(module, node, pick):
    """A value is read through ops that keep every row, whatever the number of tokens."""
    if _has_tokens(node):
        last = node.meta["val"].shape[-1]
        shape = [-1, *node.meta["val"].shape[1:]]
        calls = (
            [(aten.slice.Tensor, 0, 0, END)],
            [(aten.transpose.int, 0, -1), (aten.transpose.int, 0, -1)],
            [(aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)],
            [(aten.unsqueeze.default, 0), (aten.select.int, 0, 0)],
            [(aten.reshape.default, [-1, last]), (aten.reshape.default, shape)],
        )[pick % 5]
        put_between(module, node, -1, lambda x: behind(module, x, *calls))


# Of the scale, and of its reciprocal: some change nothing, some only beyond a magnitude.
OF_SCALE = (
    [(aten.clamp_min.default, 1e-3)], [(aten.clamp_min.default, 9e-3)],
    [(aten.clamp_max.default, 4.0)], [(aten.clamp.default, 1e-3, 4.0)], [(aten.abs.default,)],
    [(aten.mul.Tensor, 1.0)], [(aten.mul.Tensor, 2.0)],
    [(aten.reciprocal.default,), (aten.reciprocal.default,)], [(aten.view.default, [1])],
)  # fmt: skip
OF_RECIPROCAL = ([(aten.clamp_max.default, 500.0)], [(aten.mul.Tensor, 1.0)])


def scale_of_output(module, node, pick):
    """The scale of a quantized output is read through a function, or its reciprocal is."""
    pick, which = divmod(pick, len(OF_SCALE) + len(OF_RECIPROCAL))
    calls = (OF_SCALE + OF_RECIPROCAL)[which]
    for source in list(module.graph.nodes):
        reciprocal = source.target is aten.reciprocal.default
        if reciprocal if calls in OF_RECIPROCAL else source.name == "o_scale":
            put_between(module, source, -1, lambda x: behind(module, x, *calls))


def write_again(module, node, pick):
    """Other values are written into the cache of a layer, in front of its attention or behind."""
    calls = edits.find_all(module, edits.ATTENTION)
    call = calls[pick % len(calls)]
    update = call.kwargs["kv_cache_dummy_dep"]
    if update is not None and update.target is torch.ops.vllm.unified_mla_kv_cache_update.default:
        kv_c, *rest = update.args
        before = call if pick & 4 else call.next
        other = edits.add(module, before, aten.neg.default, kv_c)
        with module.graph.inserting_before(before):
            again = module.graph.call_function(update.target, (other, *rest))
        again.meta["val"] = update.meta["val"]


def buffered(module, node, pick):
    """A value in front of the first attention is kept in a buffer of another type: behind it the
    last digit, in which results may differ, could become a step of that type."""
    if is_float(node) and node < edits.attention(module):
        dtype = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)[pick % 4]
        put_between(module, node, pick // 8, lambda x: kept(module, x, dtype, pick // 4 % 2))


def _mul(*factors):
    return [(aten.mul.Tensor, factor) for factor in factors]


# Identities of real numbers: of a type some overflow, underflow, or lose digits.
IDENTITIES = (
    _mul(1e5, 1e-5), _mul(1e20, 1e20, 1e-20, 1e-20), _mul(1e-30, 1e-30, 1e30, 1e30), _mul(-1, -1),
    [(aten.add.Tensor, 1e5), (aten.sub.Tensor, 1e5)], [(aten.add.Tensor, 0.0)],
    [(aten.add.Tensor, "itself"), (aten.sub.Tensor, "itself")],
    [(aten.neg.default,), (aten.neg.default,)],
)  # fmt: skip


def constants(module, node, pick):
    """A value is read through arithmetic that changes no real number."""
    if is_float(node):
        calls = IDENTITIES[pick % len(IDENTITIES)]
        put_between(module, node, pick // len(IDENTITIES), lambda x: behind(module, x, *calls))


def split(module, node, pick):
    """A projection has two parts and a bias or an activation; one is read behind the attention."""
    found = edits.find_all(module, aten.mm.default)
    pick, which = divmod(pick, len(found))
    node = found[which]
    width = node.meta["val"].shape[-1]
    pointwise = ((aten.tanh.default,), (aten.add.Tensor, "bias"), (aten.relu.default,))[pick % 3]
    at = pick // 3 % 2

    def make(x):
        wide = edits.add(module, x.next, aten.cat.default, [x, x], -1)
        bias = behind(module, wide, (aten.select.int, 0, 0), (aten.sigmoid.default,))
        op, *args = pointwise
        wide = edits.add(module, bias.next, op, wide, *([bias] if args else []))
        halves = behind(module, wide, (aten.split.Tensor, width, -1))
        gate = edits.add(module, halves.next, operator.getitem, halves, 1 - at)
        end = module.graph.output_node()
        edits.also_return(module, edits.add(module, end, READS[pick // 6 % 3], gate))
        return edits.add(module, halves.next, operator.getitem, halves, at)

    put_between(module, node, -1, make)


def destination(module, node, pick):
    """A value, or a part of it, is where another is copied to, or what is copied; or a copy of the
    graph has its arguments the other way round."""
    which, pick = pick % 5, pick // 5
    copies = edits.find_all(module, aten.copy.default)
    if which == 4 and copies:
        copy = copies[pick % len(copies)]
        copy.args = copy.args[::-1]
    elif is_float(node):

        def make(x):
            twin = _twin(module, x, pick)
            last = max(x, twin)
            if which == 0:
                return edits.add(module, last.next, aten.copy.default, x, twin)
            if which == 1:
                return edits.add(module, last.next, aten.copy.default, twin, x)
            part, other = (
                behind(module, each, (aten.slice.Tensor, -1, 2, 6)) for each in (x, twin)
            )
            pair = (part, other) if which == 2 else (other, part)
            copied = edits.add(module, max(pair).next, aten.copy.default, *pair)
            base = twin if which == 3 else x
            after = max(copied, base).next
            return edits.add(module, after, aten.slice_scatter.default, base, copied, -1, 2, 6)

        put_between(module, node, pick // 4, make)


# Twice: those that the rules of aliases, of rows and of the scale are about.
STEPS = (
    *[alias, some_rows, scale_of_output] * 2, all_rows, read, write_again,
    buffered, constants, split, destination,
)  # fmt: skip
