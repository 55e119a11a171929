"""What the machine checks: a check that is lax would let a wrong kernel pass unseen."""

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


def test_a_wave_that_never_ends_is_seen():
    assert "runaway" in Wave().run("again:", "s_branch again")


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
