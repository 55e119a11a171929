"""Values of Gluon on a CPU, in torch: registers, addresses and shared memory.

Layouts mean nothing here: the compiler guarantees that they change no value. Shared memory is
poison until it is written: NaN, or a huge number. An address outside of its tensor is an error.
"""

import types

import torch
from triton.experimental.gluon import language as gl

TYPES = {
    gl.float8e4nv: torch.float8_e4m3fn, gl.bfloat16: torch.bfloat16, gl.float32: torch.float32,
    gl.float16: torch.float16, gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
}  # fmt: skip
NAMES = {value: key for key, value in TYPES.items()}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def raw(value):
    return value.data if isinstance(value, Tensor) else value


class Tensor:
    """Registers: a torch tensor with the operators of Gluon."""

    def __init__(self, data, layout=None):
        self.data, self.layout = data, layout
        self.shape = list(data.shape)

    @property
    def dtype(self):
        return NAMES[self.data.dtype]

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout)

    def to(self, dtype, bitcast=False):
        """Another type; uint32 becomes int64."""
        data = self.data
        if dtype == gl.uint32:
            return Tensor(data.long() & 0xFFFFFFFF, self.layout)
        if dtype == gl.float8e4nv and not bitcast:
            data = data.clamp(-448, 448)  # conversions saturate, torch's do not
        cast = data.view if bitcast else data.to
        return Tensor(cast(TYPES[dtype]), self.layout)

    def __getitem__(self, key):
        return Tensor(self.data[key], self.layout)

    def __neg__(self):
        return Tensor(-self.data, self.layout)

    def reshape(self, shape):
        return Tensor(self.data.reshape(shape), self.layout)

    def permute(self, order):
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
        layout = self.layout or getattr(other, "layout", None)
        return Tensor(getattr(self.data, name)(raw(other)), layout)

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
        assert bitcast
        wide = TYPES[dtype.element_ty]
        ratio = wide.itemsize // self.storage.dtype.itemsize
        assert not (self.offset % ratio).any(), "a store that is not aligned"
        count = len(self.storage) // ratio
        return Pointer(self.storage[: count * ratio].view(wide), self.offset // ratio)

    def read(self, mask, other):
        wanted = torch.tensor(True) if mask is None else raw(mask)
        offset, wanted = torch.broadcast_tensors(self.offset, wanted)
        chosen = offset[wanted]
        assert ((chosen >= 0) & (chosen < len(self.storage))).all(), "a read out of bounds"
        # Torch indexes no fp8.
        plain = self.storage.view(INTEGERS[self.storage.dtype.itemsize])
        filler = torch.tensor(0 if other is None else other, dtype=self.storage.dtype)
        result = filler.view(plain.dtype).expand(offset.shape).clone()
        result[wanted] = plain[chosen]
        return result.view(self.storage.dtype)

    def write(self, value, mask):
        value = torch.as_tensor(raw(value))
        wanted = torch.tensor(True) if mask is None else raw(mask)
        offset, value, wanted = torch.broadcast_tensors(self.offset, value, wanted)
        chosen = offset[wanted]
        assert ((chosen >= 0) & (chosen < len(self.storage))).all(), "a store out of bounds"
        assert value.dtype == self.storage.dtype
        self.storage[chosen] = value[wanted]


def poison(data):
    """Fill a tensor with bytes that spoil what reads them."""
    filler = torch.nan if data.is_floating_point() else 2**30
    data.copy_(torch.full(data.shape, filler).to(data.dtype))


def span(data):
    """Where a view of shared memory is: its allocation, its first byte, and the one behind it."""
    last = sum((n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True))
    begin = data.storage_offset()
    first, end = begin * data.itemsize, (begin + last + 1) * data.itemsize
    return data.untyped_storage().data_ptr(), first, end


def overlap(a, b):
    """Whether two spans share bytes, as far as their first and last say."""
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


class Shared:
    """A descriptor of shared memory: a view of a torch tensor.

    memory: what loads, and hears of stores before they are.
    """

    def __init__(self, data, memory):
        self.data, self.shape, self.dtype = data, list(data.shape), NAMES[data.dtype]
        self.memory = memory

    def index(self, at):
        return Shared(self.data[int(at)], self.memory)

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length), self.memory)

    def permute(self, order):
        return Shared(self.data.permute(order), self.memory)

    def reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(TYPES[dtype]).view(shape), self.memory)

    def load(self, layout=None):
        return self.memory.loaded(self.data, layout)

    def store(self, value):
        assert list(value.shape) == self.shape and value.dtype == self.dtype
        self.memory.stored(self.data)
        self.data.copy_(value.data)
