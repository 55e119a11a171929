"""FX graphs as data: written where they were seen, read where they are tested.

`dump` turns a post-grad graph into plain lists and dictionaries, `load` builds it again from them,
with fake values for one symbolic number of tokens. An op that this build of vLLM lacks is defined
from the schema beside the graph, without a body: such a graph can be rewritten, not run.
"""

import functools
import gzip
import importlib
import json
import re
from pathlib import Path

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion.config import vllm_compat

FOLDER = Path(__file__).with_name("recorded")
_TOKENS = 5  # the hint of every symbol


def write(path, graph, origin):
    """Write `graph` with where it comes from: the command, the machine, the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"origin": origin, **dump(graph)}, indent=0)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path):
    """The graph in a file, and where it comes from."""
    stored = json.loads(gzip.decompress(path.read_bytes()))
    return load(stored), stored["origin"]


def dump(graph):
    """`graph` as plain data."""
    schemas: dict[str, str] = {}
    nodes = [
        {
            "op": node.op,
            "name": node.name,
            "target": _encode(node.target, schemas) if node.op == "call_function" else node.target,
            "args": _encode(node.args, schemas),
            "kwargs": _encode(node.kwargs, schemas),
            "val": _encode(_value(node.meta.get("val")), schemas),
        }
        for node in graph.nodes
    ]
    return {"schemas": schemas, "nodes": nodes}


def load(stored):
    """The graph that `dump` was given."""
    for name, schema in stored["schemas"].items():
        _define_if_missing(name, schema)
    graph, entries = fx.Graph(), {entry["name"]: entry for entry in stored["nodes"]}

    def create(name):
        entry = entries[name]
        target = decoder(entry["target"]) if entry["op"] == "call_function" else entry["target"]
        args, kwargs = decoder(entry["args"]), decoder(entry["kwargs"])
        node = graph.create_node(entry["op"], target, args, kwargs, name=name)
        value = decoder(entry["val"])
        if value is not None:
            node.meta["val"] = value
        return node

    decoder = _Decoder(create)
    nodes = [decoder.node(name) for name in entries]
    graph.lint()
    for node in nodes:  # vLLM's own passes leave a graph unsorted
        graph._root.prepend(node)
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        setattr(root, node.target, torch.empty(0))  # a constant, whose values were not kept
    return fx.GraphModule(root, graph)


def _value(value):
    """What of a node's fake value a pass may read."""
    if isinstance(value, torch.Tensor):
        return {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": value.dtype,
        }
    if isinstance(value, tuple | list):
        return [_value(item) for item in value]
    if value is None or isinstance(value, int | float | torch.SymInt):
        return value
    name = vllm_compat.traced_layer_name(value)
    if name is None:
        raise TypeError(f"cannot record a value of type {type(value)}")
    return {"layer": name}


def _parsable(schema):
    """Torch prints aliases that C++ inferred as `($0! -> )`, which its parser does not read."""
    return re.sub(r"\(\$(\d+)! -> \)", r"(a\1!)", schema)


def _encode(value, schemas):
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.SymInt):
        return {"size": str(value.node.expr)}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, schemas) for item in value]}
    if isinstance(value, list):
        return [_encode(item, schemas) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, schemas) for key, item in value.items()}}
    if isinstance(value, torch._ops.OpOverload):
        schemas[str(value)] = _parsable(str(value._schema))
        return {"overload": str(value)}
    if isinstance(value, torch._ops.HigherOrderOperator):
        return {"higher": value.name()}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if callable(value) and value.__module__ in ("_operator", "math"):
        return {"function": f"{value.__module__}.{value.__name__}"}
    raise TypeError(f"cannot record {value!r} of type {type(value)}")


class _Decoder:
    """`_encode` backwards; fake values share one mode and one set of symbols.

    `create` makes the node of a name, when it is first asked for.
    """

    def __init__(self, create):
        self.node = functools.cache(create)
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)
        self.symbols: dict[str, sympy.Symbol] = {}

    def __call__(self, value):
        if isinstance(value, list):
            return [self(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        return getattr(self, f"_{kind}")(content)

    def _node(self, name):
        return self.node(name)

    def _tuple(self, items):
        return tuple(self(item) for item in items)

    def _dict(self, content):
        if content.keys() == {"layer"}:
            return _encode_layer_name(content["layer"])
        if content.keys() != {"shape", "stride", "dtype"}:
            return {key: self(item) for key, item in content.items()}
        shape, stride = self(content["shape"]), self(content["stride"])
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=self(content["dtype"]))

    def _size(self, text):
        expression = sympy.sympify(text, locals=self.symbols)
        for symbol in expression.free_symbols - set(self.symbols.values()):
            source = ConstantSource(f"recorded_{symbol}")
            made = self.shapes.create_symbol(_TOKENS, source, DimDynamic.DYNAMIC)
            self.symbols[str(symbol)] = made
        expression = sympy.sympify(text, locals=self.symbols)
        hint = int(expression.subs(dict.fromkeys(expression.free_symbols, _TOKENS)))
        return self.shapes.create_symintnode(expression, hint=hint)

    def _overload(self, name):
        namespace, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)

    def _higher(self, name):
        return getattr(torch.ops.higher_order, name)

    def _device(self, kind):
        return torch.device("cpu")  # whatever it was recorded on

    def _torch(self, name):
        return getattr(torch, name)

    def _function(self, name):
        module, function = name.split(".")
        return getattr(importlib.import_module(module), function)


_libraries: list[torch.library.Library] = []


def _define_if_missing(name, schema):
    namespace, op = name.split(".")[:2]
    if hasattr(getattr(torch.ops, namespace), op):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema.split("::", 1)[1])
    _libraries.append(library)
