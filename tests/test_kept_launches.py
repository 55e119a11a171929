"""A step repeats the launches of another layer or step, with the addresses of its own tensors."""

import contextlib
import functools
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.utils.torch_utils import _encode_layer_name

pytest.importorskip("triton")

from triton.runtime import KernelInterface, driver

from mla_fusion import attention, runtime
from mla_fusion.attention.plan import planner
from mla_fusion.config import Options
from mla_fusion.kernels import launches
from mla_fusion.kernels.ahead import Target
from mla_fusion.runtime import layer_state
from tests.attention.decodes import BF16
from tests.gpus import imitate
from tests.passes import fake_engine
from tests.passes.graphs import Spec
from tests.prepared import attach
from tests.step import forward_pass

HEADS, NOPE, LATENT, ROPE, VALUE, ROWS, PAGE = 16, 128, 512, 64, 128, 5, 64
MOST_CALLS = 115  # of Python, of both ops of a layer, without those in Triton


class Engine:
    """A layer of DeepSeek's widths, and the buffers of a decode step, which have padding."""

    def __init__(self):
        sizes = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "kv_lora_rank": LATENT}
        self.layer, self.other = (fake_engine.Layer("a", Spec(dtype=BF16)) for _ in range(2))
        for layer in (self.layer, self.other):
            vars(layer).update(sizes, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
            layer.impl.scale = 0.1
            layer.W_UK_T = torch.zeros(HEADS, NOPE, LATENT, dtype=BF16)
            layer.W_UV = torch.zeros(HEADS, LATENT, VALUE, dtype=BF16)
            layer.kv_cache = torch.zeros(8, PAGE, LATENT + ROPE, dtype=BF16)
        layers = {"a": self.layer, "b": self.other}
        attach(layers, Options("triton", "portable"), BF16, drafts=1)
        self.rows, self.sequences, self.old = ROWS - 1, 3, []
        zeros = lambda *shape: torch.zeros(ROWS, *shape, dtype=BF16)  # noqa: E731
        self.q, self.kv_c, self.k_pe = zeros(HEADS, NOPE + ROPE), zeros(LATENT), zeros(1, ROPE)
        self.prepared_q, self.output = zeros(HEADS, LATENT + ROPE), zeros(HEADS * VALUE)
        self.slots, self.positions = (torch.zeros(ROWS, dtype=torch.int64) for _ in range(2))
        self.angles = torch.zeros(9, ROPE, dtype=BF16)
        self.table = torch.zeros(ROWS, 4, dtype=torch.int32)

    @property
    def state(self):
        return layer_state.of(self.layer)

    def step(self, *watches):
        """Both ops in a forward pass of their own, and once more within each of `watches`."""
        rows, count, name = self.rows, self.sequences, _encode_layer_name("a")
        lengths = torch.full((count,), 40, dtype=torch.int32)
        decode = SimpleNamespace(seq_lens=lengths, block_table=self.table[:count])
        starts = [i + min(i, rows - count) for i in range(count + 1)]  # drafts of the first ones
        metadata = SimpleNamespace(
            num_actual_tokens=rows, num_decode_tokens=rows, max_query_len=2, decode=decode,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )  # fmt: skip
        with forward_pass({"a": self.layer}, metadata, self.slots[:rows]):
            for watch in (contextlib.nullcontext(), *watches):
                with watch:
                    runtime.fused_decode_prep(
                        self.q, self.kv_c, self.k_pe, self.prepared_q, self.positions, self.angles,
                        None, self.layer._k_scale, name, "auto", "native", False, "triton",
                    )  # fmt: skip
                    q, latents = self.prepared_q, self.kv_c
                    runtime.attention()(self.q, q, latents, self.k_pe, self.output, name, None)


class Launched:
    """What kernels, and torch's product, were launched with, tensors as addresses."""

    def __init__(self, monkeypatch):
        self.all, self.repeated = [], 0
        monkeypatch.setattr(KernelInterface, "__getitem__", lambda *of: self.compiled(*of))
        monkeypatch.setattr(torch, "bmm", lambda *_, out: self.all.append(out.data_ptr()))

    def compiled(self, kernel, grid):
        def start(*given, **options):
            self.add(kernel, grid, given)
            return Compiled(self, kernel)

        return start

    def add(self, kernel, grid, given):
        grid = (*grid, 1, 1)[:3]
        self.all.append((kernel.__name__, grid, [*map(address, given)]))

    def of(self, engine):
        """The launches of a step with two such layers, and how many of them were kept ones."""
        self.all, self.repeated = [], 0
        engine.step(contextlib.nullcontext())
        return self.all, self.repeated


class Compiled:
    def __init__(self, seen, kernel):
        self.seen, self.kernel = seen, kernel

    def __getitem__(self, grid):
        def run(*given, stream):
            self.seen.repeated += 1
            self.seen.add(self.kernel, grid, given)

        return run


def address(value):
    base = getattr(value, "base", None)
    if hasattr(base, "data_ptr") and not isinstance(value, torch.Tensor):  # a descriptor
        return base.data_ptr(), value.shape, value.strides, value.block_shape
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def launched(monkeypatch):
    imitate(monkeypatch, "sm_90")
    monkeypatch.setattr(attention, "portable_provider", lambda device: "triton")
    monkeypatch.setattr(planner, "PROVIDERS", ("triton",))
    monkeypatch.setattr(driver, "_active", Target(None))
    return Launched(monkeypatch)


def moved(name):
    def move(engine):
        owner = engine if hasattr(engine, name) else engine.layer
        engine.old.append(getattr(owner, name))  # keeps its address
        setattr(owner, name, engine.old[-1].clone())

    return move


def seen_as(name, view):
    """Another tensor of the same address."""

    def change(engine):
        owner = engine if hasattr(engine, name) else engine.layer
        setattr(owner, name, view(getattr(owner, name)))

    return change


MOVED = (
    "q", "kv_c", "k_pe", "prepared_q", "output", "slots", "positions", "angles", "table",
    "kv_cache", "W_UK_T", "W_UV", "_k_scale", "_q_scale",
)  # fmt: skip
CHANGES = {
    **{name: moved(name) for name in MOVED},
    "another layer": lambda engine: setattr(engine, "layer", engine.other),
    "scale": lambda engine: setattr(engine.layer.impl, "scale", 0.2),
    "less aligned": seen_as(
        "k_pe", lambda x: torch.zeros(x.numel() + 1, dtype=BF16)[1:].view_as(x)
    ),
    "longer blocks": seen_as("kv_cache", lambda x: x.view(4, 2 * PAGE, -1)),
    "fewer blocks": seen_as("kv_cache", lambda x: x[:4]),
    "rows less far apart": seen_as("kv_c", lambda x: x.as_strided(x.shape, (500, 1))),
    "W_UV dense in L": seen_as("W_UV", lambda x: x.view(HEADS, VALUE, LATENT).transpose(1, 2)),
    "torch multiplies": seen_as("W_UV", lambda x: x.as_strided(x.shape, (65000, 127, 1))),
    "fewer columns": seen_as("table", lambda x: x.flatten()[: ROWS * 3].view(ROWS, 3)),
    "fewer sequences": lambda engine: setattr(engine, "sequences", 2),
    "fewer drafts": lambda engine: setattr(engine, "rows", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_moved_is_launched_with_its_address(change, launched):
    engine = Engine()
    before, repeated = launched.of(engine)
    assert (len(before), repeated) == (8, 1)  # the plan is no longer fresh
    assert launched.of(engine) == (before, 8)
    CHANGES[change](engine)
    found, at_once = launched.of(engine)
    again, repeated = launched.of(engine)
    engine.state.kept._by_key.clear()
    engine.state.kept._alike.clear()
    want, _ = launched.of(engine)
    assert before != want == found == again
    assert repeated == (2 if change == "torch multiplies" else 8)
    assert (at_once == 8) == (change in (*MOVED, "another layer"))


@pytest.mark.parametrize("given", [lambda x: x, lambda x: SimpleNamespace(base=x)])
def test_a_launch_with_part_of_a_tensor_is_not_kept(given):
    """It would stay the earlier layer's part; a tensor between its rows is another one."""
    x = torch.zeros(4, 8)
    whole, part, last, beside = x[:, :4], x[1:, :4], x[3:, 3:], x[:, 4:]
    at = launches.places(whole, None, beside[:2])

    def keep(tensor):
        launch = functools.partial(print, 1, launches._without_memory(given(tensor)))
        launches.Kept().keep("key", at, [launch])

    for tensor in (whole, beside, torch.zeros(4)):
        keep(tensor)
    for tensor in (part, last):
        with pytest.raises(RuntimeError, match="bytes within a tensor of"):
            keep(tensor)


def test_tensors_at_one_address_may_part(launched):
    engine = Engine()
    engine.layer._q_scale = engine.layer._k_scale
    engine.step()
    engine.layer._q_scale = engine.layer._k_scale.clone()
    found, _ = launched.of(engine)
    engine.state.kept._by_key.clear()
    engine.state.kept._alike.clear()
    assert launched.of(engine)[0] == found


def test_kept_launches_keep_no_memory(launched):
    engine = Engine()
    engine.step()
    tensors = [weakref.ref(x) for x in (engine.q, engine.prepared_q, engine.layer.kv_cache)]
    engine.q = engine.prepared_q = engine.layer.kv_cache = None
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 3


def test_addresses_of_a_graph_fill_no_memory(launched, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(launches, "capturing", lambda: True)
    assert launched.of(engine)[1] > 0 == len(engine.state.kept._by_key)


@pytest.mark.parametrize("most", ["MOST_KEPT", "MOST_ALIKE"])
def test_what_does_not_return_fills_no_memory(most, launched, monkeypatch):
    monkeypatch.setattr(launches, most, 4)
    engine = Engine()
    for size in (3, 2, 1):
        engine.rows = engine.sequences = size
        engine.step()
    assert len(vars(engine.state.kept)["_by_key" if most == "MOST_KEPT" else "_alike"]) <= 4


def test_a_layer_takes_few_python_calls(launched):
    """A layer behind the first of a step; one of vLLM takes 68, and launches its kernels in C++."""
    engine, calls = Engine(), []
    engine.step(contextlib.nullcontext())
    launched.repeated, launched.add = 0, lambda *_: None

    @contextlib.contextmanager
    def counted():
        sys.setprofile(lambda _, event, __: calls.append(event))
        try:
            yield
        finally:
            sys.setprofile(None)

    engine.step(counted())
    assert launched.repeated == 8
    assert calls.count("call") + calls.count("c_call") <= MOST_CALLS
