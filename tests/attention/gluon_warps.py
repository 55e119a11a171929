"""Runs a Gluon kernel whose warps have different work on a CPU: what it computes, and its waits.

Triton's interpreter takes no Gluon. This takes the Python of a kernel and of all that it calls, and
gives it `gluon_values` in place of registers and shared memory. Partitions are threads, of which
one runs at a time; at each wait and arrival a random one of those that can goes on. None that can
is a deadlock, and an error.

What is asynchronous happens as late as it may: products when they are waited for, so a buffer that
is freed too early is read with what followed; copies by the engine at random until their barrier is
waited for, and their target is poison meanwhile. A product that reads what threads have stored
without a fence and a barrier behind it is an error.
"""

import itertools
import random
import threading
import types

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tests.attention.gluon_values import (
    NAMES,
    TYPES,
    Pointer,
    Shared,
    Tensor,
    assemble,
    poison,
    raw,
    storage,
)


class Barrier:
    """An mbarrier: phases completed, and the arrivals and bytes that the next one waits for."""

    def __init__(self):
        self.count, self.pending, self.bytes, self.phases = 0, 0, 0, 0

    def complete(self):
        """Begin the next phase if nothing is missing."""
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


class Barriers:
    """Shared memory of barriers."""

    def __init__(self, count):
        self.all = [Barrier() for _ in range(count)]

    def index(self, at):
        """One of them."""
        return self.all[int(at)]


class Descriptor:
    """Boxes of a tensor, for the copy engine."""

    def __init__(self, given):
        whole = torch.empty(0, dtype=given.base.dtype).set_(given.base.untyped_storage())
        shape, strides = tuple(given.shape), tuple(given.strides)
        self.data = whole.as_strided(shape, strides, given.base.storage_offset())
        self.layout = given.layout
        self.block_type = types.SimpleNamespace(
            element_ty=NAMES[given.base.dtype], shape=list(given.block_shape)
        )

    def box(self, corner):
        """The elements of a box; zeros outside of the tensor."""
        block = self.block_type.shape
        ends = [slice(at, at + n) for at, n in zip(corner, block, strict=True)]
        inside = self.data[tuple(ends)]
        found = torch.zeros(block, dtype=self.data.dtype)
        found[tuple(slice(0, n) for n in inside.shape)] = inside
        return found


class Machine:
    """One program at a time: its threads, and Gluon's functions."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.program = (0, 0)
        self.flying = []  # copies by the engine: barrier, target, value
        self.unfenced, self.unseen = set(), set()  # shared memory that products may not read yet
        self.products = threading.local()
        self.turn, self.live, self.waiting, self.failed = None, set(), {}, None
        self.changed = threading.Condition()
        self.gl = types.SimpleNamespace(
            **{name: value for name, value in vars(gl).items() if not name.startswith("__")}
        )
        for name in dir(self):
            if name.startswith("gl_"):
                setattr(self.gl, name[3:], getattr(self, name))
        self.mbarrier = types.SimpleNamespace(
            init=self.init, wait=self.wait, arrive=self.arrive, expect=self.expect,
            MBarrierLayout=lambda: "barriers",
        )  # fmt: skip
        self.namespaces = {}

    # Threads

    def runnable(self, name):
        """Whether the phase that a thread waits for is complete."""
        barrier, phase = self.waiting.get(name, (None, 0))
        return barrier is None or barrier.phases % 2 != phase

    def pick(self):
        """Give the turn to a thread that can run; land copies until there is one."""
        while self.live:
            able = [name for name in sorted(self.live) if self.runnable(name)]
            if able:
                self.turn = self.random.choice(able)
                return
            if not self.flying:
                self.failed = RuntimeError(f"a deadlock of {sorted(self.live)}")
                return
            self.land()

    def switch(self):
        """Let another thread run."""
        me = threading.current_thread().name
        with self.changed:
            while self.flying and self.random.random() < 0.4:
                self.land()
            self.pick()
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn == me or self.failed is not None)
            if self.failed is not None:
                raise RuntimeError("another thread failed")

    def run(self, name, function, args):
        """A thread of a partition."""
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.turn == name or self.failed is not None)
            self.products.open = []
            if self.failed is None:
                function(*args)
                assert not self.products.open, "products that nothing waited for"
        except Exception as error:  # noqa: BLE001 (the launch raises it)
            self.failed = self.failed or error
        with self.changed:
            self.live.discard(name)
            if self.failed is None:
                self.pick()
            self.changed.notify_all()

    def gl_warp_specialize(self, partitions, warps, registers):
        """Run all partitions."""
        assert len(warps) == len(registers) == len(partitions) - 1
        names = [f"partition {i}" for i in range(len(partitions))]
        self.live, self.waiting = set(names), {}
        threads = [
            threading.Thread(target=self.run, args=(name, *each), name=name)
            for name, each in zip(names, partitions, strict=True)
        ]
        self.pick()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        assert not self.flying, "a copy that nothing waited for"

    # Barriers and copies

    def init(self, barrier, count):
        barrier.count = barrier.pending = int(count)

    def arrive(self, barrier, count=1):
        barrier.pending -= count
        barrier.complete()
        self.switch()

    def expect(self, barrier, size):
        barrier.pending -= 1
        barrier.bytes += int(size)
        barrier.complete()

    def wait(self, barrier, phase):
        me = threading.current_thread().name
        self.waiting[me] = barrier, int(phase)
        self.switch()
        del self.waiting[me]

    def tma_load(self, descriptor, corner, barrier, target):
        assert target.shape == descriptor.block_type.shape
        value = descriptor.box([int(at) for at in corner])
        poison(target.data)
        self.flying.append((barrier, target.data, value))

    def land(self):
        """One of the copies arrives."""
        barrier, target, value = self.flying.pop(self.random.randrange(len(self.flying)))
        target.copy_(value)
        barrier.bytes -= value.numel() * value.element_size()
        barrier.complete()

    # Products

    def fence_async_shared(self):
        self.unseen |= self.unfenced
        self.unfenced.clear()

    def barrier(self):
        self.unseen.clear()

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async and a.dtype == b.dtype
        for operand in (a, b):
            if isinstance(operand, Shared):
                early = storage(operand.data) in self.unfenced | self.unseen
                assert not early, "a product reads shared memory without fence and barrier"
        out = Tensor(torch.full((a.shape[0], b.shape[1]), torch.nan), acc.layout)
        self.products.open.append((a, b, acc if use_acc else None, out))
        return out

    def warpgroup_mma_wait(self, outstanding, deps):
        self.switch()
        while len(self.products.open) > outstanding:
            a, b, acc, out = self.products.open.pop(0)
            product = a.data.float() @ b.data.float()
            out.data = product if acc is None else acc.data + product
        return deps[0] if len(deps) == 1 else tuple(deps)

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
        return Tensor(torch.where(raw(condition), raw(a), raw(b)), layout)

    def gl_maximum(self, a, b):
        return Tensor(torch.maximum(a.data, b.data), a.layout)

    def gl_minimum(self, a, b):
        return Tensor(torch.minimum(a.data, b.data), a.layout)

    def gl_max(self, a, axis):
        # NaN loses, as in the hardware's maximum.
        return Tensor(a.data.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))

    def gl_sum(self, a, axis):
        return Tensor(a.data.sum(axis))

    def gl_exp2(self, a):
        return Tensor(torch.exp2(a.data), a.layout)

    def gl_log2(self, a):
        return Tensor(torch.log2(a.data), a.layout)

    def gl_convert_layout(self, a, layout):
        return Tensor(a.data, layout)

    def gl_static_range(self, *bounds):
        return range(*bounds)

    def gl_allocate_shared_memory(self, dtype, shape, layout):
        if layout == "barriers":
            return Barriers(shape[0])
        data = torch.empty(shape, dtype=TYPES[dtype])
        poison(data)
        return Shared(data, lambda written: self.unfenced.add(storage(written)))

    def gl_inline_asm_elementwise(self, code, constraints, given, dtype, is_pure, pack):
        assert (constraints, pack, is_pure) == ("=r,r", 2, True)
        return Tensor(assemble(code, given[0].data.contiguous()).view(TYPES[dtype]))

    # Kernels

    def python(self, function):
        """A function of a kernel, over its module with the functions of this machine."""
        module = function.fn.__globals__
        if id(module) not in self.namespaces:
            space = self.namespaces[id(module)] = dict(module)
            gdc = types.SimpleNamespace(gdc_wait=lambda: 0, gdc_launch_dependents=lambda: 0)
            mine = {"gdc": gdc, "RENAMED": True}
            own = "gl mbarrier tma_load barrier fence_async_shared warpgroup_mma warpgroup_mma_wait"
            mine |= {name: getattr(self, name) for name in own.split()}
            for name, value in module.items():
                if name in mine:
                    space[name] = mine[name]
                elif isinstance(value, JITFunction):
                    space[name] = self.python(value)
                elif isinstance(value, gl.constexpr):
                    space[name] = value.value
        code = function.fn.__code__
        defaults = function.fn.__defaults__
        return types.FunctionType(code, self.namespaces[id(module)], code.co_name, defaults)

    def launch(self, kernel, grid, arguments, options):
        """Run all programs of a launch, with tensors, numbers and descriptors for arguments."""
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | {
            name: value for name, value in options.items() if name in kernel.arg_names
        }
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                named[name] = Pointer(whole, torch.tensor(value.storage_offset()))
            elif hasattr(value, "block_shape"):
                named[name] = Descriptor(value)
            elif name.islower() and isinstance(value, int):
                named[name] = Tensor(torch.tensor(value, dtype=torch.int32))
        function = self.python(kernel)
        for self.program in itertools.product(*map(range, grid)):
            function(**named)
            self.unfenced.clear()
            self.unseen.clear()
