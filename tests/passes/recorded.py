"""FX graphs of real engines on an H200, kept as data.

Post-grad graphs of one layer, as vLLM 0.26.0 handed them to the passes, in plain lists and
dictionaries. `read` builds them again, with fake values for one symbolic number of tokens. An op
that this build of vLLM lacks is defined from the schema beside the graph, without a body: such a
graph can be rewritten, not run.
"""

import functools
import gzip
import json
import pkgutil
from operator import attrgetter
from pathlib import Path

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from vllm.utils.torch_utils import _encode_layer_name

from tests.passes import declare

FOLDER = Path(__file__).with_name("recorded")
_TOKENS = 5  # the hint of every symbol


def read(path):
    """The graph in a file."""
    stored = json.loads(gzip.decompress(path.read_bytes()))
    for name, schema in stored["schemas"].items():
        namespace, op = name.split(".")[:2]
        if not hasattr(getattr(torch.ops, namespace), op):
            declare.op(namespace, schema.split("::", 1)[1])
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


class _Decoder:
    """What stands in a file by its kind; fake values share one mode and one set of symbols.

    `create` makes the node of a name, when it is first asked for.
    """

    def __init__(self, create):
        self.node = functools.cache(create)
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)
        self.symbols: dict[str, sympy.Symbol] = {}
        self.kinds = {
            "node": self.node,
            "tuple": lambda items: tuple(map(self, items)),
            "dict": self._dict,
            "size": self._size,
            "overload": lambda name: attrgetter(name)(torch.ops),
            "higher": lambda name: getattr(torch.ops.higher_order, name),
            "device": lambda kind: torch.device("cpu"),  # whatever it was recorded on
            "torch": lambda name: getattr(torch, name),
            "function": pkgutil.resolve_name,
        }

    def __call__(self, value):
        if isinstance(value, list):
            return [self(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        return self.kinds[kind](content)

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
