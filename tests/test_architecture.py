"""The rules of CONTRIBUTING.md, read from the source with `ast`: imports, and what touches vLLM."""

import ast
import functools
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mla_fusion", "passes", "patterns")  # a checkout has the latter two beside the first

# Rooms, the lowest row first: a room imports from its own row and from lower ones.
[MAP] = re.findall(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
ROWS = [re.findall(r"\w+", line[:24]) for line in MAP.splitlines()]
KNOW_NO_VLLM = {"gpu", "ops", "kernels", "attention", "projections"}
MAY_IMPORT_VLLM = {"config.vllm_compat", "passes.pipeline"}
MAY_CHANGE_VLLM = "cli.child"  # in a child process of a command
# vLLM sets it in its first own step, and a fused engine may have none.
MAY_BE_SET = "config.vllm_compat", "dcp_world_size"
MEET_VLLM = {"config", "runtime", "report"}  # rooms whose functions are given vLLM's objects
READS = {"getattr", "mla_layers"}
VLLM_OBJECTS = {"vllm_config", "compilation", "pass_config", "layer", "layers", "impl", "metadata"}
KERNEL_PACKAGES = {"torch", "triton", "numpy", "aiter", "mla_fusion"}


# Dotted name below mla_fusion -> source of every module.
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    .removeprefix("mla_fusion.")
    .removesuffix(".__init__"): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def room(name):
    """The first component: a package in a room is of that room, however deep it lies."""
    return name.split(".")[0]


def row(name):
    return next(i for i, rooms in enumerate(ROWS) if room(name) in rooms)


@functools.cache
def nodes(source):
    """Every node of a module's syntax tree."""
    return [*ast.walk(ast.parse(source))]


def imports(name, source):
    """(module, line) of every import at any depth, absolute; `from a import b` may name a.b."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports here are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def own(module):
    """The module of this library that an import means, below mla_fusion; None for others."""
    if module.split(".")[0] != "mla_fusion":
        return None
    below = module.removeprefix("mla_fusion").removeprefix(".")
    while below and below not in SOURCES:
        below = below.rpartition(".")[0]
    return below or "__init__"


def lies_above(name, module):
    """A room imports from its own row and from lower ones."""
    return row(own(module) or "__init__") > row(name)


def needs_an_engine(name, module):
    """These rooms know torch and Triton only."""
    known = KERNEL_PACKAGES | sys.stdlib_module_names
    return room(name) in KNOW_NO_VLLM and module.split(".")[0] not in known


def is_vllm(name, module):
    """Others ask config.vllm_compat."""
    may = name in MAY_IMPORT_VLLM or room(name) in ("cli", "measure", "plugin")
    return not may and module.split(".")[0] == "vllm"


def is_the_specification(name, module):
    """It reaches the product by kernels.get_provider: the user asked for it by name."""
    return own(module) == "kernels.reference"


@pytest.mark.parametrize("forbidden", (lies_above, needs_an_engine, is_vllm, is_the_specification))
def test_imports(forbidden):
    found = [
        f"{name}:{line} imports {module}"
        for name, source in SOURCES.items()
        for module, line in imports(name, source)
        if forbidden(name, module)
    ]
    assert not found, "\n".join([forbidden.__doc__, *found])


def from_vllm(nodes):
    """The names that imports from vLLM bind."""
    bound = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            bound |= {a.asname or "vllm" for a in node.names if a.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            bound |= {a.asname or a.name for a in node.names}
    return bound


def root_name(node):
    """`a` of `a.b[c].d`, else an empty string."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def origin(node):
    """`a` of `a.b`, of a call such as `a.b()`, and of what `READS` reads of `a`; else nothing."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        read = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in READS
        node = node.args[0] if read else getattr(node, "func", None) or node.value
    return node.id if isinstance(node, ast.Name) else ""


def unpacked(target, value):
    """(target, value) of each single assignment in one: `a, b = c, d`, or `a, b = c`."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    fits = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
    return zip(target.elts, value.elts if fits else [value] * len(target.elts), strict=True)


def given_by_vllm(function):
    """The parameters of a function that are vLLM's objects, by their names or because nothing else
    is `Any` in these rooms, and the local names of their parts."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    typed = {a.arg: a.annotation and ast.unparse(a.annotation) for a in named}
    found = {name for name, type_ in typed.items() if type_ == "Any" or name in VLLM_OBJECTS}
    for node in ast.walk(function):  # breadth first: an object is named before its parts
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.For):
            value = node.iter if isinstance(node, ast.For) else node.value
            for target in getattr(node, "targets", None) or [node.target]:
                for one, of in unpacked(target, value):
                    if isinstance(one, ast.Name) and origin(of) in found:
                        found.add(one.id)
    return found - {"self", "cls"}


def changed(nodes):
    """(root name, attribute, line) of everything that is set or deleted on an object."""
    for node in nodes:
        targets = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for each, _ in (pair for target in targets for pair in unpacked(target, target)):
            if isinstance(each, ast.Attribute | ast.Subscript):
                yield root_name(each), getattr(each, "attr", ""), node.lineno
        if isinstance(node, ast.Call) and root_name(node.func) in ("setattr", "delattr"):
            yield root_name(node.args[0]), "", node.lineno


def vllm_changed_elsewhere(name, source):
    if room(name) == "plugin" or name == MAY_CHANGE_VLLM:
        return
    seen = [(nodes(source), from_vllm(nodes(source)))]
    if room(name) in MEET_VLLM:
        functions = [each for each in nodes(source) if isinstance(each, ast.FunctionDef)]
        seen += [([*ast.walk(each)], given_by_vllm(each)) for each in functions]
    for where, bound in seen:
        for root, attribute, line in changed(where):
            if root in bound and (name, attribute) != MAY_BE_SET:
                yield f"{name}:{line} changes {root} of vLLM"


def version_asked_elsewhere(name, source):
    """A version of vLLM read, or an import from it that may fail."""
    if name == "config.vllm_compat":
        return
    bound, versions = from_vllm(nodes(source)), ("__version__", "__version_tuple__")
    for node in nodes(source):
        read = isinstance(node, ast.Attribute) and node.attr in versions
        if (read and root_name(node) in bound) or (
            isinstance(node, ast.ImportFrom) and node.module == "vllm.version"
        ):
            yield f"{name}:{node.lineno} reads vLLM's version"
        elif isinstance(node, ast.Try) and from_vllm(ast.walk(ast.Module(node.body, []))):
            caught = {n.id for h in node.handlers if h.type for n in ast.walk(h.type)
                      if isinstance(n, ast.Name)}  # fmt: skip
            if caught & {"ImportError", "ModuleNotFoundError", "AttributeError"}:
                yield f"{name}:{node.lineno} tries an import from vLLM"


def jit_function_returns_none(name, source):
    """Triton 3.6, that of vLLM 0.26, cannot compile it; the tests here compile with a newer one."""
    for function in nodes(source):
        decorators = map(ast.unparse, getattr(function, "decorator_list", ()))
        if any(each.endswith((".jit", ".jit()")) for each in decorators):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and getattr(node.value, "value", 0) is None:
                    yield f"{name}:{node.lineno} returns None from a function of Triton"


DEVICE = {"get_device_properties", "get_device_capability", "get_device_name", "current_target",
          "gcnArchName", "multi_processor_count", "hip"}  # fmt: skip


def device_asked_elsewhere(name, source):
    """Everything else reads a `gpu.Gpu`."""
    if name in ("gpu", "config.vllm_compat"):
        return
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr in DEVICE:
            yield f"{name}:{node.lineno} asks for {node.attr}"


MODELS = tomllib.loads((ROOT / "mla_fusion/config/models.toml").read_text())
# The demo's models, and a list of vLLM that is found by one of its classes.
MAY_NAME_MODELS = {"cli.demo.tiny_models", "cli.check.model_classes"}


def model_named_elsewhere(name, source):
    """Everything else asks `config.models`."""
    if name in MAY_NAME_MODELS:
        return
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for model in MODELS:
                if model.removesuffix("*") in node.value:
                    yield f"{name}:{node.lineno} names {model}"


RULES = (
    device_asked_elsewhere, vllm_changed_elsewhere, version_asked_elsewhere,
    jit_function_returns_none, model_named_elsewhere,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    found = [each for name, source in SOURCES.items() for each in rule(name, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "body",
    [
        "cache = vllm_config.cache_config\n    cache.block_size, cache.asked = 64, True",
        "vllm_config.additional_config['a'] = 1",
        "for layer in vllm_config.layers.values():\n        setattr(layer, 'plan', None)",
        "for x in vllm_compat.mla_layers(vllm_config.layers).values():\n        x.plan = None",
        "given = getattr(vllm_config, 'given')\n    del given.page",
    ],
)
@pytest.mark.parametrize("parameter", ["vllm_config", "vllm_config: Any", "vllm_config: object"])
def test_a_change_of_an_object_that_vllm_gave_is_seen(parameter, body):
    source = f"def choose_page({parameter}):\n    {body}\n"
    assert [*vllm_changed_elsewhere("runtime.decode_choice", source)]
    assert not [*vllm_changed_elsewhere("plugin.decision", source)]
    assert not [*vllm_changed_elsewhere("runtime.x", "def f(own: Plan):\n    own.page = 64\n")]


def test_no_modules_import_each_other():
    """At any depth."""
    edges = {
        name: {own(module) for module, _ in imports(name, source)} - {None, name}
        for name, source in SOURCES.items()
    }
    TopologicalSorter(edges).prepare()


def test_the_map_has_every_room():
    assert sorted({*map(room, SOURCES)}) == sorted(name for rooms in ROWS for name in rooms)
