"""A grammar of MLA decode graphs for hypothesis: a spelling, and edits of its graph.

`SPECS` are traced graphs that between them show every pair of values of the options below.
`STEPS` are edits as data, so that hypothesis can shrink them; `apply` makes them. An edit takes a
graph, one of its nodes and a number that chooses between its variants, and does nothing where it
has no meaning. A graph that an edit broke does not run before the passes, and is not counted.
"""

import itertools
import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from tests.passes import edits, programs
from tests.passes.graphs import Spec
from tests.passes.programs import is_float
from tests.passes.rotations import ROPES

aten, prims = torch.ops.aten, torch.ops.prims

BF16, FP32 = torch.bfloat16, torch.float32


def _each(field, *values):
    return [((field, value),) for value in values]


# Fields of a `Spec`. One layer where a value is rounded to 8 or 16 bits: the next layer would
# amplify the rounding.
OPTIONS: tuple[list[tuple[tuple[str, Any], ...]], ...] = (
    _each("rope", *ROPES, "native_late_cast"),
    _each("is_neox", False, True),
    _each("layers", 1, 2, 3),
    _each("q_lora", False, True),
    _each("layer_name", "input", "constant"),
    _each("dynamic", True, False),
    [
        (),
        (("dtype", BF16), ("table_dtype", FP32), ("layers", 1)),
        (("dtype", BF16), ("kv_cache_dtype", "fp8"), ("layers", 1)),
    ],
    [(), *_each("scaled", "in_place")],
    _each("ir_norm", False, True),
    [(), *_each("quantized", "group_tma", "group_ue8m0", "tensor", "tensor_native")],
)


def every_spec():
    """All combinations of `OPTIONS`, without repetition; of norms of the IR and of quantizations
    only `SPECS` has some.

    What reads the output does not meet what makes the query.
    """
    rows = itertools.product(*OPTIONS[:-2])
    return list(dict.fromkeys(spec for spec in map(_spec, rows) if _exists(spec)))


def _exists(spec):
    """Whether vLLM can build it: DeepSeek's form leaves k_pe in the table's type, so both agree.

    And whether it can be compared: a layer behind a quantized output would amplify a rounding.
    """
    builds = spec.rope != "deepseek" or spec.table_dtype in (None, spec.dtype)
    return builds and not (spec.quantized and spec.layers > 1)


def _spec(row):
    return Spec(**dict(itertools.chain(*row)))


def pairwise():
    """A few combinations among which every two values of two options meet, found greedily."""
    rows = list(itertools.product(*OPTIONS))
    random.Random(0).shuffle(rows)
    rows = [row for row in rows if _exists(_spec(row))]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return list(dict.fromkeys(map(_spec, chosen)))


SPECS = pairwise()


def is_pure(node):
    """Whether the node is an aten op, which reads its arguments and writes nothing."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def duplicate(module, node, pick):
    """Some readers of a node read a twin of it."""
    twins = is_pure(node) or node.target in (edits.operator.getitem, auto_functionalized)
    if not twins:
        return
    users = list(node.users)
    with module.graph.inserting_after(node):
        twin = module.graph.node_copy(node)
    for index, user in enumerate(users):
        if pick >> index & 1:
            user.replace_input_with(node, twin)


# What one row becomes depends on other rows.
MIXES_ROWS: tuple[tuple[Any, ...], ...] = ((aten.flip.default, [0]), (aten.cumsum.default, 0))
# Foreign ops, and some that change nothing.
FOREIGN: tuple[tuple[Any, ...], ...] = (
    (aten.mul.Tensor, 1.0), (aten.mul.Tensor, 1.5), (aten.neg.default,), (aten.clone.default,),
    (aten.tanh.default,), (aten.add.Tensor, 0.25), (aten.flip.default, [-1]),
    (aten.roll.default, [1], [-1]), *MIXES_ROWS,
)  # fmt: skip
ROUNDED = (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.float8_e4m3fn)


def splice(module, node, pick):
    """Readers of a node read another value than before."""
    target, *args = FOREIGN[pick % len(FOREIGN)]
    if is_float(node) and node.op == "call_function":
        _put_between(module, node, pick // len(FOREIGN), [(target, *args)])


# Steps after which a row that is padding may be read.
ROWS = {
    programs.alias, programs.read, programs.some_rows, programs.all_rows, programs.split,
    programs.destination,
}  # fmt: skip


def mixes_rows(steps):
    """Whether these edits let rows without a slot, which hold anything, into others."""
    return any(
        edit in ROWS or (edit is splice and FOREIGN[pick % len(FOREIGN)] in MIXES_ROWS)
        for edit, _, pick in steps
    )


def change_dtype(module, node, pick):
    """Readers of a node read it in another type, or rounded to it and put back."""
    if not is_float(node) or node.op != "call_function":
        return
    cast = prims.convert_element_type.default
    calls = [(cast, ROUNDED[pick % len(ROUNDED)]), (cast, node.meta["val"].dtype)]
    pick //= len(ROUNDED)
    _put_between(module, node, pick // 4, calls if pick % 4 else calls[:1])


def _put_between(module, node, pick, calls):
    """Chosen readers of `node` read it through `calls`, (op, further arguments) each."""
    programs.put_between(module, node, pick, lambda x: programs.behind(module, x, *calls))


def scale(module, node, pick):
    """The first query is multiplied after its rotation, as in vLLM or in a way that is kept.

    By a factor of each token, twice by it, by one of each head or of each channel; then rounded.
    """
    kind = pick % 4
    if kind < 2:
        if "positions" not in {n.name for n in module.graph.nodes}:
            return  # nothing depends on them
        factors = [edits.factor_of_positions(module)] * (kind + 1)
    else:
        factors = [edits.factor_of_columns(module)[kind - 2]]
    edits.scale_query(module, *factors, dtype=(None, *ROUNDED)[pick // 4 % 6])


def bypass(module, node, pick):
    """A node is dropped: its readers read an input of the same shape and type."""
    if not (is_pure(node) and is_float(node)):
        return
    value = node.meta["val"]
    for source in node.all_input_nodes:
        other = source.meta.get("val")
        same = isinstance(other, torch.Tensor) and other.dtype == value.dtype
        if same and list(map(str, other.shape)) == list(map(str, value.shape)):
            node.replace_all_uses_with(source)
            return


def drop_order(module, node, pick):
    """The attention no longer waits for its cache update, or waits for another layer's."""
    if "kv_cache_dummy_dep" in node.kwargs:
        others = [n for n in edits.find_all(module, edits.UPDATE) if n < node]
        choice = others[pick % len(others)] if others and pick & 1 else None
        edits.set_argument(node, kv_cache_dummy_dep=choice)


def swap(module, node, pick):
    """A node moves down as far as its first reader, or a few places."""
    after = node
    for _ in range(pick % 8 + 1):
        following = after.next
        if following in node.users or following.op in ("output", "placeholder"):
            break
        after = following
    if after is not node and is_pure(node):
        after.append(node)


def drop_metadata(module, node, pick):
    """A node loses its metadata."""
    if not node.name.startswith(("layer_name", "tokens")):
        node.meta.pop("val", None)


def change_constant(module, node, pick):
    """Halves are swapped, a sign or a flag of the op is flipped, a slice starts elsewhere, a limit
    is another."""
    if node.target is edits.operator.getitem and node.args[0].target is aten.split.Tensor:
        node.args = (node.args[0], 1 - node.args[1])  # type: ignore[operator]
    elif node.target in (aten.sub.Tensor, aten.add.Tensor):
        node.target = aten.add.Tensor if node.target is aten.sub.Tensor else aten.sub.Tensor
    elif flag := next((name for name in FLAGS if name in node.kwargs), ""):
        node.kwargs = {**node.kwargs, flag: not node.kwargs[flag]}
    elif node.target in LIMITS:
        node.args = (node.args[0], (240.0, 3.0, 1.5, 0.25)[pick % 4] * LIMITS[node.target])
    elif node.target in PLACES:
        at = PLACES[node.target]
        start, end = (*node.args[at:], None, None)[:2]
        if isinstance(start, int) and start >= 2:
            # Of the same length, elsewhere; an end beyond the tensor becomes the end less 2.
            beyond = not isinstance(end, int) or end >= 1 << 30
            node.args = (*node.args[:at], start - 2, -2 if beyond else end - 2)


FLAGS = ("is_neox", "scale_ue8m0")
LIMITS = {aten.clamp_min.default: -1, aten.clamp_max.default: 1}
# The position of a slice's start among the arguments.
PLACES = {aten.slice.Tensor: 2, aten.slice_scatter.default: 3}
EDITS = (
    *programs.STEPS, duplicate, splice, change_dtype, scale, bypass, drop_order, swap,
    drop_metadata, change_constant,
)  # fmt: skip
# Edits whose graphs Inductor computes otherwise than eager torch: it keeps the digits of a value
# that is rounded and put back, and drops a write of the cache whose result nothing reads.
EAGER = {change_dtype, scale, programs.buffered, programs.write_again}
# Edits after which every layer must still fuse.
HARMLESS = (swap, programs.all_rows)
_STEP = st.tuples(st.sampled_from(EDITS), st.integers(0, 1 << 12), st.integers(0, 1 << 12))
STEPS = st.lists(_STEP, min_size=1, max_size=4)


def apply(module, steps):
    """Make the edits, each at a node chosen by its number."""
    for edit, where, pick in steps:
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        try:
            edit(module, nodes[where % len(nodes)], pick)
        except (KeyError, RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            continue  # it needs metadata that an earlier one dropped, or shapes that do not fit
    module.graph.lint()


def misplace(module, where):
    """Move a pure node in front of what it reads, as some of vLLM's passes leave nodes."""
    nodes = [n for n in module.graph.nodes if is_pure(n) and n.all_input_nodes]
    node = nodes[where % len(nodes)]
    source = node.all_input_nodes[0]
    if source.op == "call_function":
        source.prepend(node)
