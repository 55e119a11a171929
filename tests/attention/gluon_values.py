"""Values of Gluon on a CPU, in torch: registers, addresses and shared memory.

Layouts mean nothing here: the compiler guarantees that they change no value. Shared memory is NaN
until it is written. An address outside of its tensor is an error.
"""

import types

import torch
from triton.experimental.gluon import language as gl

TYPES = {
    gl.bfloat16: torch.bfloat16, gl.float32: torch.float32, gl.int32: torch.int32,
    gl.int64: torch.int64,
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

    def to(self, dtype):
        """Another type."""
        return Tensor(self.data.to(TYPES[dtype]), self.layout)

    def __getitem__(self, key):
        return Tensor(self.data[key], self.layout)

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


OPERATORS = "add radd sub mul rmul rtruediv floordiv mod and lt le gt ge eq"
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

    def read(self, mask, other):
        """The elements where the mask says, `other` elsewhere."""
        shape, wanted = self.offset.shape, torch.tensor(True) if mask is None else raw(mask)
        if mask is not None:
            shape = torch.broadcast_shapes(shape, wanted.shape)
        offset, wanted = self.offset.expand(shape), wanted.expand(shape)
        chosen = offset[wanted]
        assert ((chosen >= 0) & (chosen < len(self.storage))).all(), "a read out of bounds"
        result = torch.full(shape, 0 if other is None else other, dtype=self.storage.dtype)
        result[wanted] = self.storage[chosen]
        return result

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
    """Fill a tensor with what spoils all that reads it."""
    data.fill_(torch.nan)


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
        """The same elements in another shape."""
        assert dtype == self.dtype
        return Shared(self.data.view(shape), self.stored)

    def load(self, layout=None):
        """The elements."""
        return Tensor(self.data.clone(), layout)

    def store(self, value):
        """Write the elements."""
        assert list(value.shape) == self.shape and value.dtype == self.dtype
        self.data.copy_(value.data)
        self.stored(self.data)
