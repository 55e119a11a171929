"""Runs a Gluon kernel whose warps have different work on a CPU: what it computes, and its waits.

Partitions are threads, of which one runs at a time; at each wait and arrival a random one of those
that can goes on. None that can is a deadlock, and an error.

What is asynchronous happens as late as it may: products when they are waited for, so a buffer that
is freed too early is read with what followed; copies by the engine at random until their barrier is
waited for, and their target is poison meanwhile.

So do loads from shared memory: a barrier waits for no load, and the copy engine keeps no order with
them. They have ended where their values are used, and at a fence. Three more are errors: one thread
that arrives for all of a partition before a barrier behind what they loaded and stored; a copy over
memory that threads load or store; and a product's values in registers that no wait keeps.
"""

import random
import threading
import types

import torch

from tests.attention.gluon_program import Program
from tests.attention.gluon_values import NAMES, Shared, Tensor, overlap, poison, span


class Barrier:
    """An mbarrier: phases completed, and the arrivals and bytes that the next one waits for."""

    def __init__(self):
        self.count, self.pending, self.bytes, self.phases = 0, 0, 0, 0

    def complete(self):
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


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
        block = self.block_type.shape
        ends = [slice(at, at + n) for at, n in zip(corner, block, strict=True)]
        inside = self.data[tuple(ends)]
        found = torch.zeros(block, dtype=self.data.dtype)
        found[tuple(slice(0, n) for n in inside.shape)] = inside
        return found


class Loading(Tensor):
    """Registers whose load from shared memory ends where they are used."""

    def __init__(self, view, layout):
        self.view, self.layout, self.shape = view, layout, list(view.shape)
        self.ended = None

    @property
    def data(self):
        """The values; from now on they stay."""
        if self.ended is None:
            self.ended = self.view.clone()
        return self.ended

    @property
    def dtype(self):
        return NAMES[self.view.dtype]

    def reads(self, data):
        """Whether the load may still read bytes that lie between the first and last of `data`."""
        return self.ended is None and overlap(span(self.view), span(data))


class Machine(Program):
    """A program: its threads, its barriers and copies, and their open products."""

    own = (*Program.own, "mbarrier", "tma_load")

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.flying = []  # copies by the engine: barrier, target, value
        self.loading = []  # loads from shared memory: thread, values
        self.touched = set()  # threads that read or wrote shared memory since their last barrier
        self.products = threading.local()
        self.turn, self.live, self.waiting, self.failed = None, set(), {}, None
        self.changed = threading.Condition()
        own = {name: getattr(self, name) for name in ("init", "wait", "arrive", "expect")}
        self.mbarrier = types.SimpleNamespace(**own, MBarrierLayout=lambda: "barriers")

    def argument(self, name, value):
        return Descriptor(value) if hasattr(value, "block_shape") else super().argument(name, value)

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
        me = self.threads()
        with self.changed:
            while self.flying and self.random.random() < 0.4:
                self.land()
            self.pick()
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn == me or self.failed is not None)
            if self.failed is not None:
                raise RuntimeError("another thread failed")

    def run(self, name, function, args):
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.turn == name or self.failed is not None)
            self.products.open = []
            if self.failed is None:
                function(*args)
                assert not self.products.open, "products that nothing waited for"
        # A thread cannot raise into the test: `gl_warp_specialize` raises what it keeps here.
        except Exception as error:  # noqa: BLE001
            self.failed = self.failed or error
        with self.changed:
            self.live.discard(name)
            if self.failed is None:
                self.pick()
            self.changed.notify_all()

    def gl_warp_specialize(self, partitions, warps, registers):
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

    def arrive(self, barrier, count=1, pred=True):
        count *= bool(pred)
        early = self.threads() in self.touched
        assert not early, "one thread arrives before the others have read or written"
        barrier.pending -= count
        barrier.complete()
        self.switch()

    def expect(self, barrier, size):
        barrier.pending -= 1
        barrier.bytes += int(size)
        barrier.complete()

    def wait(self, barrier, phase):
        self.waiting[self.threads()] = barrier, int(phase)
        self.switch()
        del self.waiting[self.threads()]

    def tma_load(self, descriptor, corner, barrier, target):
        self.behind("a copy is started")
        assert target.shape == descriptor.block_type.shape
        assert target.dtype == descriptor.block_type.element_ty
        late = any(values.reads(target.data) for _, values in self.loading)
        assert not late, "a copy over shared memory that threads still load"
        assert not self.is_early(target.data), "a copy over what threads stored without a fence"
        value = descriptor.box([int(at) for at in corner])
        poison(target.data)
        self.flying.append((barrier, target.data, value))

    def land(self):
        barrier, target, value = self.flying.pop(self.random.randrange(len(self.flying)))
        target.copy_(value)
        barrier.bytes -= value.numel() * value.element_size()
        barrier.complete()

    # Threads and shared memory

    def threads(self):
        return threading.current_thread().name

    def loaded(self, data, layout):
        values = Loading(data, layout)
        self.loading.append((self.threads(), values))
        self.touched.add(self.threads())
        return values

    def end_loads(self, which):
        """Loads end: of some threads and values."""
        for each in filter(which, self.loading):
            _ = each[1].data
        self.loading = [each for each in self.loading if each[1].ended is None]

    def stored(self, data):
        # Loads and stores keep their order, which barriers make.
        self.end_loads(lambda each: each[1].reads(data))
        self.touched.add(self.threads())
        super().stored(data)

    def fence_async_shared(self):
        self.end_loads(lambda each: each[0] == self.threads())
        super().fence_async_shared()

    def barrier(self):
        self.touched.discard(self.threads())
        super().barrier()

    def ended(self):
        self.loading.clear()
        self.touched.clear()
        super().ended()

    # Products

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        self.check_operands(a, b)
        if isinstance(a, Loading):
            _ = a.data  # its registers are full when it starts
        out = Tensor(torch.full((a.shape[0], b.shape[1]), torch.nan), acc.layout)
        self.products.open.append((a, b, acc if use_acc else None, out))
        return out

    def warpgroup_mma_wait(self, outstanding, deps):
        self.switch()
        while len(self.products.open) > outstanding:
            a, b, acc, out = self.products.open.pop(0)
            kept = [*deps, *(each[0] for each in self.products.open)]
            held = isinstance(a, Shared) or any(a is each for each in kept)
            assert held, "a product reads registers that its wait does not keep"
            product = a.data.float() @ b.data.float()
            out.data = product if acc is None else acc.data + product
        return deps[0] if len(deps) == 1 else tuple(deps)

    # Functions of Gluon

    def gl_allocate_shared_memory(self, dtype, shape, layout):
        if layout == "barriers":
            made = [Barrier() for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda at: made[int(at)])
        return super().gl_allocate_shared_memory(dtype, shape, layout)
