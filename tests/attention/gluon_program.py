"""How a Gluon kernel runs on a CPU, program after program: its launch, and Gluon's functions.

Triton's interpreter takes no Gluon. This takes the Python of a kernel and of all that it calls, and
gives it `gluon_values` in place of registers and shared memory. Products, and what runs beside
what, are of the two machines: `gluon_double.py` and `gluon_warps.py`.

`cp.async` lands as late as it may, in the `wait_group` that waits for it; until then its target is
poison. Source addresses that are not at their vector's alignment are an error.

Both refuse a matrix product that reads what threads have written to shared memory without a fence
and a barrier of the same threads behind it. And where a launch precedes the end of the kernel in
front (PDL), threads that have not waited for that one may read the plan, and nothing else.
"""

import itertools
import types

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tests.attention.gluon_ptx import assemble
from tests.attention.gluon_values import TYPES, Pointer, Shared, Tensor, overlap, poison, raw, span

# What no kernel in front writes: the plan, whose kernel ends before, and a scale.
PLAN = (
    "work_indptr_ptr", "work_info_ptr", "qo_indptr_ptr", "reduce_indptr_ptr",
    "reduce_partial_map_ptr", "scale_ptr",
)  # fmt: skip


def elementwise(function):
    """The method of Gluon that is this function of torch, of tensors and numbers."""

    def method(self, *given):
        layout = next(each.layout for each in given if isinstance(each, Tensor))
        return Tensor(function(*(torch.as_tensor(raw(each)) for each in given)), layout)

    return method


class Program:
    """One program at a time: its number, what its products may read; and Gluon's functions.

    own: the names of a kernel's module that a machine has something else for; hopper: of Gluon's.
    """

    hopper = ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")
    own = ("gl", "barrier", "async_copy", "async_load", *hopper)

    def __init__(self):
        self.program, self.grid = (0, 0), (1, 1)
        # Shared memory that products may not read yet, and the threads that wrote it.
        self.unfenced, self.unseen = set(), set()
        # Whether the kernel in front may run, what is read meanwhile, and who has waited for it.
        self.pdl, self.plan, self.waited = False, (), set()
        self.gdc = types.SimpleNamespace(
            gdc_wait=lambda: self.waited.add(self.threads()),
            gdc_launch_dependents=lambda: self.behind("a kernel that reads the plan is launched"),
        )
        mine = {"static_range": range}
        mine |= {name[3:]: getattr(self, name) for name in dir(self) if name.startswith("gl_")}
        self.gl = types.SimpleNamespace(**vars(gl) | mine)
        self.namespaces = {}
        self.groups, self.open = [], []  # asynchronous copies
        self.async_copy = types.SimpleNamespace(
            commit_group=self.commit_group, wait_group=self.wait_group
        )

    # The kernel in front

    def behind(self, what):
        assert not self.pdl or self.threads() in self.waited, f"{what} before the kernel in front"

    # Asynchronous copies

    def async_load(self, target, pointer, mask=None):
        """A copy that lands later; zeros where the mask says no."""
        self.behind("a copy is started")
        shape = torch.broadcast_shapes(pointer.offset.shape, raw(mask).shape)
        vector = 16 // pointer.storage.dtype.itemsize
        if len(shape) == 2 and shape[1] >= vector:
            first = pointer.offset.expand(shape)[raw(mask).expand(shape)][::vector]
            assert not (first % vector).any(), "a copy that is not aligned"
        value = pointer.read(mask, 0)
        assert list(value.shape) == target.shape
        self.stored(target.data)
        poison(target.data)
        self.open.append((target.data, value))

    def commit_group(self):
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.copy_(value)
                self.stored(target)

    # What products may read

    def threads(self):
        """The name of the threads that run: all of a program, or a partition's."""
        return ""

    def loaded(self, data, layout):
        return Tensor(data.clone(), layout)

    def stored(self, data):
        self.unfenced.add((self.threads(), span(data)))

    def fence_async_shared(self):
        """Writes so far are seen by products of the same thread."""
        mine = {each for each in self.unfenced if each[0] == self.threads()}
        self.unseen |= mine
        self.unfenced -= mine

    def barrier(self):
        """Fenced writes are seen by products of all threads."""
        self.unseen = {each for each in self.unseen if each[0] != self.threads()}

    def is_early(self, data):
        """Whether products may not read shared memory, nor the copy engine write it."""
        return any(overlap(span(data), each) for _, each in self.unfenced | self.unseen)

    def check_operands(self, a, b):
        """Refuse operands of a product that it may not read, or of two types."""
        assert a.dtype == b.dtype
        for operand in (a, b):
            if isinstance(operand, Shared):
                early = self.is_early(operand.data)
                assert not early, "a product reads shared memory without fence and barrier"

    # Functions of Gluon

    def gl_program_id(self, axis):
        return Tensor(torch.tensor(self.program[axis], dtype=torch.int32))

    def gl_num_programs(self, axis):
        return self.grid[axis]

    def gl_num_warps(self):
        return self.warps

    def gl_arange(self, start, end, layout=None):
        return Tensor(torch.arange(start, end, dtype=torch.int32), layout)

    def gl_full(self, shape, value, dtype, layout=None):
        return Tensor(torch.full(shape, value, dtype=TYPES[dtype]), layout)

    def gl_zeros(self, shape, dtype, layout=None):
        return self.gl_full(shape, 0.0, dtype, layout)

    def gl_load(self, pointer, mask=None, other=None, eviction_policy=None):
        if pointer.storage.data_ptr() not in self.plan:
            self.behind("more than the plan is read")
        return Tensor(pointer.read(mask, other))

    def gl_store(self, pointer, value, mask=None):
        self.behind("something is written")
        pointer.write(value, mask)

    def gl_where(self, condition, a, b):
        layout = next((x.layout for x in (a, b) if isinstance(x, Tensor)), None)
        return Tensor(torch.where(torch.as_tensor(raw(condition)), raw(a), raw(b)), layout)

    gl_abs, gl_exp2, gl_log2 = map(elementwise, (torch.abs, torch.exp2, torch.log2))
    gl_maximum, gl_minimum = map(elementwise, (torch.maximum, torch.minimum))
    gl_div_rn = elementwise(torch.div)
    gl_fma = elementwise(lambda a, b, c: (a.double() * b.double() + c.double()).float())
    gl_full_like = elementwise(torch.full_like)

    def gl_max(self, a, axis):
        # NaN loses, as in the hardware's maximum.
        return Tensor(a.data.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))

    def gl_min(self, a, axis):
        return Tensor(a.data.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(axis))

    def gl_sum(self, a, axis):
        return Tensor(a.data.sum(axis))

    def gl_join(self, a, b):
        return Tensor(torch.stack([a.data, b.data], -1), a.layout)

    def gl_split(self, a):
        return tuple(Tensor(part, a.layout) for part in a.data.unbind(-1))

    def gl_convert_layout(self, a, layout):
        return a if isinstance(a, Pointer) else Tensor(a.data, layout)

    def gl_inline_asm_elementwise(self, code, constraints, given, dtype, is_pure, pack):
        outputs = constraints.count("=")
        given = torch.broadcast_tensors(*(each.data for each in given))
        assert is_pure and all(pack * each.itemsize == 4 for each in given)
        found = assemble(code, outputs, *given)
        types = dtype if outputs > 1 else [dtype]
        values = [Tensor(x.view(TYPES[t])) for x, t in zip(found, types, strict=True)]
        return tuple(values) if outputs > 1 else values[0]

    def gl_allocate_shared_memory(self, dtype, shape, layout):
        data = torch.empty(shape, dtype=TYPES[dtype])
        poison(data)
        return Shared(data, self)

    # Kernels

    def namespace(self, module):
        """The names of a kernel's module, with the functions of this machine."""
        if id(module) not in self.namespaces:
            space = self.namespaces[id(module)] = dict(module)
            mine = {"gdc": self.gdc, "RENAMED": True, "tl": self.gl}
            mine["hopper"] = types.SimpleNamespace(**{n: getattr(self, n) for n in self.hopper})
            mine |= {name: getattr(self, name) for name in self.own}
            for name, value in module.items():
                if name in mine:
                    space[name] = mine[name]
                elif isinstance(value, JITFunction):
                    space[name] = self.python(value)
                elif isinstance(value, types.ModuleType) and "attention" in value.__name__:
                    space[name] = types.SimpleNamespace(**self.namespace(vars(value)))
                elif isinstance(value, gl.constexpr):
                    space[name] = value.value
        return self.namespaces[id(module)]

    def python(self, function):
        """A function of a kernel, over its module with the functions of this machine."""
        code, defaults = function.fn.__code__, function.fn.__defaults__
        return types.FunctionType(
            code, self.namespace(function.fn.__globals__), code.co_name, defaults
        )

    def argument(self, name, value):
        if isinstance(value, torch.Tensor):
            whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            return Pointer(whole, torch.tensor(value.storage_offset()))
        if name.islower() and isinstance(value, int):
            return Tensor(torch.tensor(value, dtype=torch.int32))
        return value

    def ended(self):
        """A program has ended, and has waited for its copies."""
        assert not self.open and not any(self.groups), "a copy that nothing waited for"
        self.groups.clear()
        for each in (self.unfenced, self.unseen, self.waited):
            each.clear()

    def launch(self, given):
        """Run a `kernels.launches.Launch`."""
        kernel, grid, arguments, options = given
        self.pdl, self.warps = bool(options.get("launch_pdl")), options["num_warps"]
        named = {name: self.argument(name, arguments[name]) for name in kernel.arg_names}
        self.plan = [named[name].storage.data_ptr() for name in PLAN if name in named]
        self.grid, function = grid, self.python(kernel)
        for self.program in itertools.product(*map(range, grid)):
            function(**named)
            self.ended()
