"""Run a launch on the machine: memory is that of the tensors, and each access is checked."""

import ctypes
import dataclasses
import re
import struct

import numpy as np

from tests.amd import build, encode
from tests.amd.compile import tensors

# In the order of the enumeration in machine/state.h.
FAULTS = (
    "none", "read", "write", "LDS bounds", "LDS race", "barrier", "runaway", "unsupported",
    "register without a wait",
)  # fmt: skip
_PACKING = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f"}
_HIDDEN = ("hidden_block_count_x", "hidden_block_count_y", "hidden_block_count_z")
# What the machine takes for granted: fp32 to nearest even with denormals, IEEE mode, no scratch.
_DIRECTIVES = {
    "float_round_mode_32": 0, "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3,
    "ieee_mode": 1, "private_segment_fixed_size": 0, "user_sgpr_kernarg_segment_ptr": 1,
    "user_sgpr_dispatch_ptr": 0, "user_sgpr_queue_ptr": 0, "user_sgpr_dispatch_id": 0,
    "user_sgpr_kernarg_preload_offset": 0, "system_vgpr_workitem_id": 0, "tg_split": 0,
}  # fmt: skip
Machine = build.structure("Machine", FAULTS=len(FAULTS))
Region, Start = map(build.structure, ("Region", "Start"))


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is run, of what the hardware leaves open.

    backwards: the last workgroup runs first, and in each the last wave. rounding: of v_rcp_f32,
    v_exp_f32 and v_log_f32, which are accurate to 1 ulp: 0 to nearest, 1 up, -1 down. preload: the
    hardware has put the first arguments into registers; if not, the kernel's own prologue loads
    them. seed: of the rubbish. limit: instructions of a wave.
    """

    backwards: bool = False
    rounding: int = 0
    preload: bool = True
    seed: int = 12345
    limit: int = 10_000_000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """counts: executions of each instruction. faults: the number of each kind. first: the first
    fault in words, or empty."""

    counts: np.ndarray
    faults: dict[str, int]
    first: str


def _size_of(name):
    found = getattr(build.library(), f"size_of_{name}")
    found.restype = ctypes.c_uint64
    return found()


def run(given, writable, settings=None):
    """Execute a launch; `writable` names the tensors it may write.

    The outcome says what was wrong with an access; the caller compares the tensors.
    """
    settings = settings or Settings()
    kernel = given.kernel
    directives = kernel.program.directives
    wrong = {n: directives[n] for n, want in _DIRECTIVES.items() if directives[n] != want}
    assert not wrong, f"the machine does not know a kernel with {wrong}; see tests/amd/execute.py"
    code = encode.program(kernel.program)
    counts = np.zeros(len(code), np.uint64)
    arguments = _arguments(given)
    regions = _regions(given, writable, arguments)
    lds, tags, waves = (
        np.zeros(count * size, np.uint8)
        for count, size in (
            (kernel.lds, 1), (kernel.lds, _size_of("tag")), (kernel.warps, _size_of("wave"))
        )
    )  # fmt: skip
    machine = Machine(
        regions=ctypes.addressof(regions), region_count=len(regions), counts=counts.ctypes.data,
        limit=settings.limit, seed=settings.seed, lds=lds.ctypes.data, tags=tags.ctypes.data,
        rounding=settings.rounding, fnuz=kernel.target == "gfx942", lds_size=kernel.lds,
    )  # fmt: skip
    start, user = _start(kernel.program, arguments, settings)
    build.library().run_launch(
        ctypes.byref(machine), code, ctypes.byref(start), (ctypes.c_uint32 * 3)(*given.grid),
        waves.ctypes.data_as(ctypes.c_void_p), kernel.warps, int(settings.backwards),
    )  # fmt: skip
    del user  # `start` has its address
    faults = {name: n for name, n in zip(FAULTS, machine.faults, strict=True) if n}
    return Outcome(counts, faults, _first(machine, given, regions))


def _first(machine, given, regions):
    if not machine.fault_kind:
        return ""
    kind, address, line = FAULTS[machine.fault_kind], machine.fault_address, machine.fault_line
    text = next(each.text for each in given.kernel.program.instructions if each.line == line)
    where = f"{address:#x}"
    names = ("arguments", *tensors(given))
    for name, region in zip(names, regions, strict=True):
        if region.begin - 4096 <= address < region.end + 4096 and kind in ("read", "write"):
            where += f", {address - region.begin} bytes after the start of {name}"
    by = f"by wave {machine.fault_wave} in line {line}: {text}"
    return f"{kind} of {machine.fault_size} bytes at {where}, {by}"


def _arguments(given):
    """The bytes of the kernel's arguments, laid out as its metadata says."""
    program = given.kernel.program
    size = program.directives["kernarg_size"]
    packed = bytearray(size)
    explicit = program.arguments[: len(given.kernel.parameters)]
    for (name, kind), (offset, width, _) in zip(given.kernel.parameters, explicit, strict=True):
        value = given.values[name]
        if kind.startswith("*"):
            kind, value = "u64", value.data_ptr()
        data = struct.pack(_PACKING[kind], value)
        assert len(data) == width, (name, kind, width)
        packed[offset : offset + width] = data
    for offset, width, kind in program.arguments[len(explicit) :]:
        if kind in _HIDDEN:
            number = given.grid[_HIDDEN.index(kind)]
            packed[offset : offset + width] = number.to_bytes(width, "little")
        elif not re.match(r"hidden_|global_buffer", kind):
            raise NotImplementedError(f"an argument of kind {kind}; see tests/amd/execute.py")
    return ctypes.create_string_buffer(bytes(packed), size)


def _regions(given, writable, arguments):
    """What may be read and written: the arguments, and each tensor from its first element to its
    last; overlapping tensors have a region each."""
    begin = ctypes.addressof(arguments)
    found = [Region(begin, begin + len(arguments), 1, 0)]
    for name, tensor in tensors(given).items():
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = tensor.data_ptr() + (span if tensor.numel() else 0) * tensor.element_size()
        found.append(Region(tensor.data_ptr(), end, 1, int(name in writable)))
    return (Region * len(found))(*found)


def _start(program, arguments, settings):
    """How the waves start, by the directives of the kernel, and the scalars they start with."""
    directives = program.directives
    address = ctypes.addressof(arguments)
    preloaded = directives["user_sgpr_kernarg_preload_length"]
    words = np.frombuffer(arguments, np.uint32)[:preloaded]
    if not settings.preload:
        words = np.full(preloaded, 0xDEAD0000, np.uint32)
    user = np.array([address & 0xFFFFFFFF, address >> 32, *words], np.uint32)
    assert len(user) == directives["user_sgpr_count"]
    begin = 0
    if preloaded and settings.preload:
        # The prologue for hardware that does not preload ends in a jump to where this one starts.
        jump = next(each for each in program.instructions if each.name == "s_branch")
        begin = program.labels[jump.operands[0]]
    vectors = directives["accum_offset"]
    start = Start(
        user=user.ctypes.data, user_count=len(user), vectors=vectors, pc=begin,
        accumulators=max(0, directives["next_free_vgpr"] - vectors),
        mode=directives["fp16_overflow"] << 23,
    )  # fmt: skip
    start.dimensions[:] = [directives[f"system_sgpr_workgroup_id_{axis}"] for axis in "xyz"]
    return start, user
