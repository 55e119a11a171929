"""Runs a Gluon kernel on a CPU, program after program, in torch: what it computes, not how.

Triton's interpreter takes no Gluon. This takes the Python of a kernel and of all that it calls, and
gives it tensors of torch in place of registers and shared memory. Layouts mean nothing here: the
compiler guarantees that they change no value. Races between warps are not seen, but for one: a
matrix product may read shared memory only after a fence behind its last write, and a barrier then.

Asynchronous copies land as late as they may, in the `wait_group` that waits for them; until then
their target is poison. Shared memory and everything unwritten is poison too: NaN, or a huge number.
An address outside of its tensor, or not at its vector's alignment, is an error.
"""

import itertools
import re
import types

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

TYPES = {
    gl.float8e4nv: torch.float8_e4m3fn, gl.bfloat16: torch.bfloat16, gl.float32: torch.float32,
    gl.float16: torch.float16, gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
}  # fmt: skip
NAMES = {value: key for key, value in TYPES.items()}


def raw(value):
    """The torch tensor or number in a value."""
    return value.data if isinstance(value, Tensor) else value


class Tensor:
    """Registers: a torch tensor with the operators of Gluon."""

    def __init__(self, data, layout=None):
        self.data, self.layout = data, layout
        self.shape = list(data.shape)

    @property
    def dtype(self):
        """Gluon's type."""
        return NAMES[self.data.dtype]

    @property
    def type(self):
        """What Gluon says of a tensor: its layout."""
        return types.SimpleNamespace(layout=self.layout)

    def to(self, dtype, bitcast=False):
        """Another type; uint32 becomes int64."""
        if dtype == gl.uint32:
            return Tensor(self.data.long() & 0xFFFFFFFF, self.layout)
        if bitcast:
            return Tensor(self.data.view(TYPES[dtype]), self.layout)
        data = self.data
        if dtype == gl.float8e4nv:
            data = data.clamp(-448, 448)  # conversions saturate, torch's do not
        return Tensor(data.to(TYPES[dtype]), self.layout)

    def __getitem__(self, key):
        return Tensor(self.data[key], self.layout)

    def reshape(self, shape):
        """Another shape, in the same order."""
        return Tensor(self.data.reshape(shape), self.layout)

    def permute(self, order):
        """Dimensions in another order."""
        return Tensor(self.data.permute(order), self.layout)

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)


def operator(name):
    """The method of that name of torch, between tensors and numbers."""

    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(getattr(self.data, name)(raw(other)), self.layout)

    return method


OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv mod and or xor lshift rshift
    lt le gt ge eq"""
for name in OPERATORS.split():
    setattr(Tensor, f"__{name}__", operator(f"__{name}__"))


class Pointer:
    """Addresses: offsets in elements into all of a tensor's storage from its first element on."""

    def __init__(self, storage, offset):
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=NAMES[storage.dtype])

    def __add__(self, other):
        return Pointer(self.storage, self.offset + torch.as_tensor(raw(other)).long())

    __radd__ = __add__

    def __getitem__(self, key):
        return Pointer(self.storage, self.offset[key])

    def to(self, dtype, bitcast):
        """Pointers to elements of another size."""
        assert bitcast
        wide = TYPES[dtype.element_ty]
        ratio = wide.itemsize // self.storage.dtype.itemsize
        assert not (self.offset % ratio).any(), "a store that is not aligned"
        count = len(self.storage) // ratio
        return Pointer(self.storage[: count * ratio].view(wide), self.offset // ratio)

    def read(self, mask, other):
        """The elements where the mask says, `other` elsewhere."""
        shape, wanted = self.offset.shape, torch.tensor(True) if mask is None else raw(mask)
        if mask is not None:
            shape = torch.broadcast_shapes(shape, wanted.shape)
        offset, wanted = self.offset.expand(shape), wanted.expand(shape)
        chosen = offset[wanted]
        assert ((chosen >= 0) & (chosen < len(self.storage))).all(), "a read out of bounds"
        size = self.storage.dtype.itemsize
        plain = self.storage.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size))
        filler = torch.tensor(0 if other is None else other, dtype=self.storage.dtype)
        result = filler.view(plain.dtype).expand(shape).clone()
        result[wanted] = plain[chosen]
        return result.view(self.storage.dtype)

    def write(self, value, mask):
        """Store the elements where the mask says."""
        value = torch.as_tensor(raw(value))
        wanted = torch.tensor(True) if mask is None else raw(mask)
        shape = torch.broadcast_shapes(self.offset.shape, value.shape, wanted.shape)
        offset, value, wanted = (x.expand(shape) for x in (self.offset, value, wanted))
        chosen = offset[wanted]
        assert ((chosen >= 0) & (chosen < len(self.storage))).all(), "a store out of bounds"
        assert value.dtype == self.storage.dtype
        self.storage[chosen] = value[wanted]


def poison(data):
    """Fill a tensor with bytes that spoil what reads them."""
    data.copy_(torch.full(data.shape, 2**30).to(data.dtype) if not data.is_floating_point()
               else torch.full(data.shape, torch.nan).to(data.dtype))  # fmt: skip


def storage(data):
    """The allocation that a view is of."""
    return data.untyped_storage().data_ptr()


class Shared:
    """A descriptor of shared memory: a view of a torch tensor."""

    def __init__(self, data, stored):
        self.data, self.shape, self.dtype = data, list(data.shape), NAMES[data.dtype]
        self.stored = stored

    def index(self, at):
        """One of the first dimension."""
        return Shared(self.data[int(at)], self.stored)

    def slice(self, start, length, dim=0):
        """Some of a dimension."""
        return Shared(self.data.narrow(dim, start, length), self.stored)

    def permute(self, order):
        """Dimensions in another order."""
        return Shared(self.data.permute(order), self.stored)

    def reinterpret(self, dtype, shape, layout):
        """The same bytes as another type."""
        return Shared(self.data.view(TYPES[dtype]).view(shape), self.stored)

    def load(self, layout=None):
        """The elements."""
        return Tensor(self.data.clone(), layout)

    def store(self, value):
        """Write the elements."""
        assert list(value.shape) == self.shape and value.dtype == self.dtype
        self.data.copy_(value.data)
        self.stored(self.data)


def assemble(code, values):
    """Run the PTX of `hopper_packed.widen` on int16 `values`, two in each 32-bit register."""
    packed = values.reshape(-1, 2).contiguous().view(torch.uint8)
    outputs, names = {}, {"$2": packed}
    for line in code.strip("{} \n").split(";"):
        match = re.match(r"\s*(\S+)\s+(.*)", line)
        if match is None or match[1] == ".reg":
            continue
        if match[1] == "mov.b32":
            low, high, source = re.findall(r"\w+", match[2])
            names[low], names[high] = names[source][:, :2], names[source][:, 2:]
            continue
        target, *given = match[2].replace(" ", "").split(",")
        if match[1] == "prmt.b32":
            order = [int(digit, 16) for digit in reversed(given[2][2:])]
            names[target] = names[given[0]][:, order]
        else:
            assert match[1] == "cvt.rn.f16x2.e4m3x2"
            codes = names[given[0]].contiguous().view(torch.float8_e4m3fn)
            outputs[target] = codes.to(torch.float16).reshape(values.shape)
    return outputs["$0"], outputs["$1"]


class Machine:
    """One program at a time: its number, its copies in flight; and Gluon's functions."""

    def __init__(self):
        self.program, self.groups, self.open = (0, 0), [], []
        self.unfenced, self.unseen = set(), set()  # shared memory that products may not read yet
        every = itertools.chain(vars(gl).items())
        self.gl = types.SimpleNamespace(**{k: v for k, v in every if not k.startswith("__")})
        for name in dir(self):
            if name.startswith("gl_"):
                setattr(self.gl, name[3:], getattr(self, name))
        self.copies = types.SimpleNamespace(
            commit_group=self.commit_group, wait_group=self.wait_group
        )
        self.namespaces = {}

    # Asynchronous copies

    def async_load(self, target, pointer, mask=None):
        """A copy that lands later; zeros where the mask says no."""
        shape = torch.broadcast_shapes(pointer.offset.shape, raw(mask).shape)
        vector = 16 // pointer.storage.dtype.itemsize
        if len(shape) == 2 and shape[1] >= vector:
            first = pointer.offset.expand(shape)[raw(mask).expand(shape)][::vector]
            assert not (first % vector).any(), "a copy that is not aligned"
        value = pointer.read(mask, 0)
        assert list(value.shape) == target.shape
        poison(target.data)
        self.open.append((target.data, value))

    def commit_group(self):
        """End a group of copies."""
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        """Land all groups but the last ones."""
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.copy_(value)
                self.unfenced.add(storage(target))

    # What products may read

    def stored(self, data):
        """Shared memory has been written by threads."""
        self.unfenced.add(storage(data))

    def fence_async_shared(self):
        """Writes so far are seen by products of the same thread."""
        self.unseen |= self.unfenced
        self.unfenced.clear()

    def barrier(self):
        """Fenced writes are seen by products of all threads."""
        self.unseen.clear()

    # Functions of Gluon

    def gl_program_id(self, axis):
        return Tensor(torch.tensor(self.program[axis], dtype=torch.int32))

    def gl_arange(self, start, end, layout=None):
        return Tensor(torch.arange(start, end, dtype=torch.int32), layout)

    def gl_full(self, shape, value, dtype, layout=None):
        return Tensor(torch.full(shape, value, dtype=TYPES[dtype]), layout)

    def gl_zeros(self, shape, dtype, layout=None):
        return self.gl_full(shape, 0.0, dtype, layout)

    def gl_load(self, pointer, mask=None, other=None):
        return Tensor(pointer.read(mask, other))

    def gl_store(self, pointer, value, mask=None):
        pointer.write(value, mask)

    def gl_where(self, condition, a, b):
        layout = next((x.layout for x in (a, b) if isinstance(x, Tensor)), None)
        return Tensor(torch.where(torch.as_tensor(raw(condition)), raw(a), raw(b)), layout)

    def gl_maximum(self, a, b):
        return Tensor(torch.maximum(a.data, torch.as_tensor(raw(b))), a.layout)

    def gl_minimum(self, a, b):
        return Tensor(torch.minimum(a.data, torch.as_tensor(raw(b))), a.layout)

    def gl_max(self, a, axis):
        # NaN loses, as in the hardware's maximum.
        return Tensor(a.data.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))

    def gl_sum(self, a, axis):
        return Tensor(a.data.sum(axis))

    def gl_abs(self, a):
        return Tensor(a.data.abs(), a.layout)

    def gl_exp2(self, a):
        return Tensor(torch.exp2(a.data), a.layout)

    def gl_log2(self, a):
        return Tensor(torch.log2(a.data), a.layout)

    def gl_split(self, a):
        return tuple(Tensor(part, a.layout) for part in a.data.unbind(-1))

    def gl_convert_layout(self, a, layout):
        return Tensor(a.data, layout)

    def gl_static_range(self, *bounds):
        return range(*bounds)

    def gl_allocate_shared_memory(self, dtype, shape, layout):
        data = torch.empty(shape, dtype=TYPES[dtype])
        poison(data)
        return Shared(data, self.stored)

    def gl_inline_asm_elementwise(self, code, constraints, given, dtype, is_pure, pack):
        assert (constraints, dtype, pack) == ("=r,=r,r", (gl.float16, gl.float16), 2)
        return tuple(Tensor(each, given[0].layout) for each in assemble(code, given[0].data))

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        """A matrix product, at once."""
        assert a.dtype == b.dtype
        for operand in (a, b):
            if isinstance(operand, Shared):
                early = storage(operand.data) in self.unfenced | self.unseen
                assert not early, "a product reads shared memory without fence and barrier"
        product = a.data.float() @ b.data.float()
        return Tensor(acc.data + product if use_acc else product, acc.layout)

    def warpgroup_mma_wait(self, outstanding, deps):
        """Products are done already."""
        return deps[0] if len(deps) == 1 else tuple(deps)

    # Kernels

    def python(self, function):
        """A function of a kernel, over its module with the functions of this machine."""
        module = function.fn.__globals__
        if id(module) not in self.namespaces:
            space = self.namespaces[id(module)] = dict(module)
            done = types.SimpleNamespace(gdc_wait=lambda: 0, gdc_launch_dependents=lambda: 0)
            nothing = {"gdc": done}
            mine = {"gl": self.gl, "async_copy": self.copies, "async_load": self.async_load}
            own = ("warpgroup_mma", "warpgroup_mma_wait", "fence_async_shared", "barrier")
            mine |= {name: getattr(self, name) for name in own} | nothing | {"RENAMED": True}
            for name, value in module.items():
                if name in mine:
                    space[name] = mine[name]
                elif isinstance(value, JITFunction):
                    space[name] = self.python(value)
                elif isinstance(value, gl.constexpr):
                    space[name] = value.value
        code = function.fn.__code__
        return types.FunctionType(code, self.namespaces[id(module)], code.co_name)

    def launch(self, kernel, grid, arguments, options):
        """Run all programs of a launch, with tensors and numbers for arguments."""
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | {
            name: value for name, value in options.items() if name in kernel.arg_names
        }
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                named[name] = Pointer(whole, torch.tensor(value.storage_offset()))
            elif name.islower() and isinstance(value, int):
                named[name] = Tensor(torch.tensor(value, dtype=torch.int32))
        function = self.python(kernel)
        for self.program in itertools.product(*map(range, grid)):
            function(**named)
            assert not self.open and not any(self.groups), "a copy that nothing waited for"
            self.groups.clear()
            self.unfenced.clear()
            self.unseen.clear()
