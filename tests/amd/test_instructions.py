"""Instructions of memory and LDS; waits, and what the machine checks."""

import numpy as np
import pytest

from tests.amd import assembly
from tests.amd.alone import Wave
from tests.amd.encode import UnknownInstruction

LANE = np.arange(64)
RNG = np.random.default_rng(5)


def words(*shape):
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def base_of(wave, array, index=4):
    """The address of an array in a pair of scalars."""
    wave.set_pair(index, array.ctypes.data)


def buffer_of(wave, array, index=4):
    """A buffer descriptor of an array, as Triton makes it."""
    base_of(wave, array, index)
    wave.s[index + 2 : index + 4] = array.nbytes, 0x27000


SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
NARROW = {"ubyte": np.uint8, "sbyte": np.int8, "ushort": np.uint16, "sshort": np.int16}


@pytest.mark.parametrize("kind", ["global", "buffer"])
@pytest.mark.parametrize("name", SIZES)
def test_loads_and_stores(kind, name):
    count = SIZES[name] // 4
    source, target = words(70, 4), np.zeros((70, 4), np.uint32)
    wave = Wave(readable=[source], writable=[target])
    wave.v[0] = 16 * LANE
    (base_of if kind == "global" else buffer_of)(wave, source, 4)
    (base_of if kind == "global" else buffer_of)(wave, target, 8)
    data = f"v[10:{9 + count}]" if count > 1 else "v10"
    lines = {
        "global": (f"{data}, v0, s[4:5] offset:16", f"v0, {data}, s[8:9] offset:16"),
        "buffer": (
            f"{data}, v0, s[4:7], 0 offen offset:16",
            f"{data}, v0, s[8:11], 0 offen offset:16",
        ),
    }[kind]  # fmt: skip
    wave.set_pair(126, 2**64 - 2)  # not the first lane
    assert not wave.run(
        f"{kind}_load_{name} {lines[0]}", "s_waitcnt vmcnt(0)", f"{kind}_store_{name} {lines[1]}"
    )
    want = np.zeros_like(target)
    want[2:65, :count] = source[2:65, :count]
    np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_loads(name):
    source = words(64).view(NARROW[name])
    wave = Wave(readable=[source])
    base_of(wave, source)
    wave.v[0] = LANE * source.itemsize
    assert not wave.run(f"global_load_{name} v10, v0, s[4:5]", "s_waitcnt vmcnt(0)")
    np.testing.assert_array_equal(wave.v[10], source[:64].astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize("high", ["", "_hi"])
@pytest.mark.parametrize("name, size", [("ubyte_d16", 1), ("short_d16", 2)])
def test_loads_of_half_registers(name, size, high):
    source, old = words(64), words(64)
    wave = Wave(readable=[source])
    base_of(wave, source)
    wave.v[0], wave.v[10] = 4 * LANE, old
    # The half that is kept is of an earlier load, which a wait has covered.
    assert not wave.run(
        "v_mov_b32_e32 v11, v10", f"global_load_{name}{high} v10, v0, s[4:5]", "s_waitcnt vmcnt(0)"
    )
    value = source & (0xFF if size == 1 else 0xFFFF)
    half = wave.v[10] >> 16 if high else wave.v[10] & 0xFFFF
    np.testing.assert_array_equal(half, value)


@pytest.mark.parametrize("name", ["byte", "short", "byte_d16_hi", "short_d16_hi"])
def test_narrow_stores(name):
    size, shift = 1 if "byte" in name else 2, 16 if "hi" in name else 0
    target = np.zeros(64, np.uint32)
    wave = Wave(writable=[target])
    base_of(wave, target)
    wave.v[0], wave.v[10] = 4 * LANE, words(64)
    assert not wave.run(f"global_store_{name} v0, v10, s[4:5]")
    np.testing.assert_array_equal(target, wave.v[10] >> shift & (256**size - 1))


def test_a_buffer_reads_zero_and_writes_nothing_beyond_its_end():
    source, target = words(64), np.zeros(64, np.uint32)
    wave = Wave(readable=[source], writable=[target])
    buffer_of(wave, source, 4)
    buffer_of(wave, target, 8)
    wave.v[0] = np.where(LANE % 2, 0x80000000, 4 * LANE)
    assert not wave.run(
        "buffer_load_dword v10, v0, s[4:7], 0 offen",
        "s_waitcnt vmcnt(0)",
        "v_or_b32_e32 v11, 1, v10",
        "buffer_store_dword v11, v0, s[8:11], 0 offen",
    )
    np.testing.assert_array_equal(wave.v[10], np.where(LANE % 2, 0, source))
    np.testing.assert_array_equal(target, np.where(LANE % 2, 0, source | 1))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count):
    source = words(20)
    wave = Wave(readable=[source])
    base_of(wave, source)
    name = "s_load_dword" + (f"x{count}" if count > 1 else "")
    result = f"s[16:{15 + count}]" if count > 1 else "s16"
    assert not wave.run(f"{name} {result}, s[4:5], 0x8", "s_waitcnt lgkmcnt(0)")
    np.testing.assert_array_equal(wave.s[16 : 16 + count], source[2 : 2 + count])


@pytest.mark.parametrize("name, size, keeps", [
    ("b32", 4, 32), ("b64", 8, 32), ("b96", 12, 32), ("b128", 16, 32), ("b8", 1, 8), ("b16", 2, 16),
])  # fmt: skip
def test_lds(name, size, keeps):
    wave = Wave(lds=64 * 16 + 16)
    wave.v[0] = 16 * LANE
    wave.v[10:14] = words(4, 64)
    count = max(1, size // 4)
    data = f"v[10:{9 + count}]" if count > 1 else "v10"
    back = f"v[20:{19 + count}]" if count > 1 else "v20"
    read = {"b8": "u8", "b16": "u16"}.get(name, name)
    assert not wave.run(
        f"ds_write_{name} v0, {data} offset:16", f"ds_read_{read} {back}, v0 offset:16",
        "s_waitcnt lgkmcnt(0)",
    )  # fmt: skip
    want = wave.v[10 : 10 + count] & np.uint32(2**keeps - 1)
    np.testing.assert_array_equal(wave.v[20 : 20 + count], want)
    stored = wave.lds[16:].reshape(64, 16)[:, :size]
    np.testing.assert_array_equal(stored, wave.v[10:14].T.copy().view(np.uint8)[:, :size])


@pytest.mark.parametrize("stride", ["", "st64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_pairs_of_lds_accesses(bits, stride):
    count, unit = bits // 32, bits // 8 * (64 if stride else 1)
    wave = Wave(lds=64 * 32 + 4 * unit)
    wave.v[0] = 32 * LANE
    wave.v[10:14] = words(4, 64)
    first, second = (f"v[{k}:{k + count - 1}]" if count > 1 else f"v{k}" for k in (10, 12))
    back = f"v[20:{19 + 2 * count}]"
    assert not wave.run(
        f"ds_write2{stride}_b{bits} v0, {first}, {second} offset0:1 offset1:3",
        f"ds_read2{stride}_b{bits} {back}, v0 offset0:1 offset1:3",
        f"ds_read_b{bits} v[30:{29 + count}], v0 offset:{3 * unit}",
        "s_waitcnt lgkmcnt(0)",
    )
    if not stride:  # with it lanes write over each other
        want = np.concatenate([wave.v[10 : 10 + count], wave.v[12 : 12 + count]])
        np.testing.assert_array_equal(wave.v[20 : 20 + 2 * count], want)
    np.testing.assert_array_equal(wave.v[20 + count : 20 + 2 * count], wave.v[30 : 30 + count])


@pytest.mark.parametrize("bits, dtype", [(8, np.uint8), (16, np.uint16)])
def test_transposing_reads(bits, dtype):
    """Of 16 lanes: their 8-byte pieces are rows of a matrix; each lane gets a column."""
    wave = Wave(lds=512)
    wave.lds[:] = RNG.integers(0, 256, 512)
    wave.v[0] = 8 * LANE
    assert not wave.run(f"ds_read_b64_tr_b{bits} v[10:11], v0", "s_waitcnt lgkmcnt(0)")
    got = wave.v[10:12].T.copy().view(dtype)
    # Rows of 16 elements: as many lanes hold one as it has pieces.
    blocks = wave.lds.view(dtype).reshape(4, -1, 16)
    np.testing.assert_array_equal(got.reshape(4, 16, -1), blocks.transpose(0, 2, 1))


def test_atomic_additions_return_what_was_there():
    """Lanes of one counter take turns; an inactive one adds nothing."""
    counters, by = words(4), words(64)
    want, old = counters.copy(), []
    wave = Wave(writable=[counters])
    base_of(wave, counters)
    wave.v[0], wave.v[10] = 4 * (LANE % 4), by
    wave.set_pair(126, 2**64 - 2)
    for lane in range(1, 64):
        old.append(want[lane % 4])
        want[lane % 4] = (int(want[lane % 4]) + int(by[lane])) % 2**32
    add = "global_atomic_add v11, v0, v10, s[4:5] sc0"
    assert not wave.run(add, "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v12, v11")
    np.testing.assert_array_equal(counters, want)
    np.testing.assert_array_equal(wave.v[12][1:], old)
    wave = Wave(writable=[counters])
    base_of(wave, counters)
    wave.v[0] = 4 * (LANE % 4)
    assert wave.run(add, "v_mov_b32_e32 v12, v11") == {"register without a wait"}
    wave = Wave(readable=[counters])
    base_of(wave, counters)
    wave.v[0] = 0
    assert wave.run(add, "s_waitcnt vmcnt(0)") == {"write"}


@pytest.mark.parametrize("waits, faults", [
    (("s_waitcnt vmcnt(0)",), set()),
    (("s_waitcnt vmcnt(1)",), {"register without a wait"}),
    (("s_waitcnt lgkmcnt(0)",), {"register without a wait"}),
    ((), {"register without a wait"}),
])  # fmt: skip
def test_a_load_without_a_wait_is_seen(waits, faults):
    source = words(64)
    wave = Wave(readable=[source])
    base_of(wave, source)
    wave.v[0] = 4 * LANE
    line = "global_load_dword v10, v0, s[4:5]"
    assert wave.run(line, *waits, "v_mov_b32_e32 v11, v10") == faults
    assert (wave.v[11] == source).all() == (not faults)


def test_counts_of_waits():
    """vmcnt(1) covers the older of two loads; a scalar load only lgkmcnt(0)."""
    source = words(64)
    wave = Wave(readable=[source])
    base_of(wave, source)
    wave.v[0] = 4 * LANE
    two = ["global_load_dword v10, v0, s[4:5]", "global_load_dword v11, v0, s[4:5]"]
    assert not wave.run(*two, "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v12, v10")
    late = {"register without a wait"}
    assert wave.run(*two, "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v12, v11") == late
    for count, faults in ((0, set()), (1, late)):
        wave = Wave(readable=[source])
        base_of(wave, source)
        lines = ["s_load_dword s20, s[4:5], 0x0", "ds_read_b32 v10, v0", "v_mov_b32_e32 v1, s20"]
        assert wave.run(*lines[:2], f"s_waitcnt lgkmcnt({count})", lines[2]) == faults
    # A register that a load is on its way to must not be written either.
    wave = Wave(readable=[source])
    base_of(wave, source)
    assert wave.run("global_load_dword v10, v0, s[4:5]", "v_mov_b32_e32 v10, 0") == late


def test_an_lds_write_without_a_wait_is_not_there_yet():
    for waits in ((), ("s_waitcnt lgkmcnt(0)",)):
        wave = Wave()
        wave.v[10] = 7
        wave.run("ds_write_b32 v0, v10", *waits, "s_barrier")
        assert (wave.lds[0] == 7) == bool(waits)


@pytest.mark.parametrize("line, fault", [
    ("global_load_dword v10, v0, s[4:5] offset:4", "read"),
    ("global_store_dword v0, v10, s[4:5]", "write"),  # not writable
    ("s_load_dwordx2 s[20:21], s[4:5], 0xfc", "read"),
    ("ds_read_b64 v[10:11], v0 offset:4", "LDS bounds"),
    ("ds_write_b8 v0, v10 offset:300", "LDS bounds"),
])  # fmt: skip
def test_accesses_out_of_bounds_are_seen(line, fault):
    source = words(64)
    wave = Wave(lds=256, readable=[source])
    base_of(wave, source)
    wave.v[0] = 4 * LANE
    assert wave.run(line, "s_waitcnt vmcnt(0) lgkmcnt(0)") == {fault}


@pytest.mark.parametrize("first, second, races", [
    ("ds_write_b32 v0, v10", "ds_read_b32 v11, v0", True),
    ("ds_read_b32 v11, v0", "ds_write_b32 v0, v10", True),
    ("ds_write_b32 v0, v10", "ds_write_b32 v0, v12", True),
    ("ds_write_b32 v0, v10", "ds_write_b32 v0, v10", False),  # the same value
    ("ds_read_b32 v11, v0", "ds_read_b32 v11, v0", False),
])  # fmt: skip
def test_races_in_lds_are_seen(first, second, races):
    one = Wave()
    one.v[0], one.v[12] = 4 * LANE, 9
    assert not one.run(first)
    two = Wave(number=1)
    two.machine.lds, two.machine.tags = one.machine.lds, one.machine.tags
    two.v[0], two.v[12] = 4 * LANE, 9
    assert two.run(second) == ({"LDS race"} if races else set())


def test_every_line_of_a_kernel_is_read():
    """Those of inline assembly may begin without a tab."""
    text = "\t.globl\tk\nk:\n\t.loc 1\n\ts_nop 0\nv_mov_b32 v0, v1\n\n\ts_endpgm\n.Lfunc_end0:\n"
    found = assembly.parse(text).instructions
    assert [each.name for each in found] == ["s_nop", "v_mov_b32", "s_endpgm"]
    with pytest.raises(ValueError, match="line 5 is no instruction"):
        assembly.parse(text.replace("v_mov_b32 v0, v1", "what"))


def test_the_unknown_is_named():
    with pytest.raises(UnknownInstruction, match=r"v_dot2_f32_f16.*operations.py"):
        Wave().run("v_dot2_f32_f16 v0, v1, v2, v3")
    with pytest.raises(UnknownInstruction, match=r"modifiers.*mul.*encode.py"):
        Wave().run("v_add_f32_e64 v0, v1, v2 mul:2")
    with pytest.raises(UnknownInstruction, match="not this form"):
        Wave().run("v_cvt_scalef32_pk_f32_fp8 v[0:1], v1, 2.0")
    # Of its own workgroup alone; and an addition that returns nothing.
    with pytest.raises(UnknownInstruction, match=r"buffer_wbl2`.*operations.py"):
        Wave().run("buffer_wbl2")
    with pytest.raises(UnknownInstruction, match="not this form"):
        Wave().run("global_atomic_add v0, v1, s[2:3]")
