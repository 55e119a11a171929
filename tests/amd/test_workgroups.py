"""Workgroups that run at once: what one sees of another, by a small program of two of them."""

import numpy as np
import pytest
import torch

from tests.amd import assembly, execute
from tests.amd.compile import Kernel, Launch

# Each thread of two workgroups stores the number of its group + 1, and each group counts itself.
# The last one reads what both have stored.
PASS_ON = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
v_lshlrev_b32 v1, 2, v0
s_lshl_b32 s3, s2, 9
v_add_u32 v2, s3, v1
s_add_i32 s2, s2, 1
v_mov_b32 v3, s2
v_readfirstlane_b32 s10, v0
s_waitcnt lgkmcnt(0)
global_store_dword v2, v3, s[4:5]
s_waitcnt vmcnt(0)
s_barrier
s_cmp_lg_u32 s10, 0
s_cbranch_scc1 .Lend
buffer_wbl2 sc1
s_waitcnt vmcnt(0)
v_mov_b32 v4, 0
v_mov_b32 v5, 1
s_mov_b64 exec, 1
global_atomic_add v5, v4, v5, s[6:7] sc0
s_mov_b64 exec, -1
s_waitcnt vmcnt(0)
buffer_inv sc1
v_readfirstlane_b32 s10, v5
s_cmp_lg_u32 s10, 1
s_cbranch_scc1 .Lend
v_lshlrev_b32 v1, 4, v0
global_load_dwordx4 v[8:11], v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dwordx4 v1, v[8:11], s[8:9]
.Lend:
s_endpgm
"""
DIRECTIVES = {
    "float_round_mode_32": 0, "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3,
    "ieee_mode": 1, "private_segment_fixed_size": 0, "user_sgpr_kernarg_segment_ptr": 1,
    "user_sgpr_dispatch_ptr": 0, "user_sgpr_queue_ptr": 0, "user_sgpr_dispatch_id": 0,
    "user_sgpr_kernarg_preload_offset": 0, "system_vgpr_workitem_id": 0, "tg_split": 0,
    "kernarg_size": 24, "user_sgpr_kernarg_preload_length": 0, "user_sgpr_count": 2,
    "accum_offset": 16, "next_free_vgpr": 16, "fp16_overflow": 0,
    "system_sgpr_workgroup_id_x": 1, "system_sgpr_workgroup_id_y": 0,
    "system_sgpr_workgroup_id_z": 0,
}  # fmt: skip
PARAMETERS = ("stored", "count", "read")


def launch(text):
    """A launch of two workgroups of two waves with this program."""
    instructions, labels = [], {}
    for line in filter(None, text.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            mnemonic, _, rest = line.partition(" ")
            instructions.append(assembly.instruction(len(instructions) + 1, mnemonic, rest))
    arguments = tuple((8 * number, 8, "global_buffer") for number in range(3))
    program = assembly.Program("kernel", tuple(instructions), labels, DIRECTIVES, arguments)
    values = {name: torch.zeros(256, dtype=torch.int32) for name in PARAMETERS}
    parameters = tuple((name, "*i32") for name in PARAMETERS)
    return Launch(Kernel("gfx942", program, parameters, 2, 0), values, (2, 1, 1))


def outcome(text, backwards=False):
    """Faults, and what the last workgroup has read."""
    given = launch(text)
    found = execute.run(given, PARAMETERS, execute.Settings(backwards=backwards))
    return set(found.faults), given.values


WANT = np.repeat([1, 2], 128)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_last_workgroup_reads_what_others_have_stored(backwards):
    faults, values = outcome(PASS_ON, backwards)
    assert not faults
    np.testing.assert_array_equal(values["stored"], WANT)
    np.testing.assert_array_equal(values["read"], WANT)
    assert values["count"][0] == 2


STORE = "global_store_dword v2, v3, s[4:5]\n"
WRITE_BACK = "buffer_wbl2 sc1\ns_waitcnt vmcnt(0)\n"


@pytest.mark.parametrize("before, after, missed", [
    (STORE + "s_waitcnt vmcnt(0)\n", STORE, [True, True]),
    ("s_barrier\n", "", [True, False]),  # the waves that wait for nothing run first, backwards
    ("buffer_wbl2 sc1\n", "", [True, True]),
    (WRITE_BACK, "buffer_wbl2 sc1\n", [True, True]),
    ("buffer_inv sc1\n", "", [True, True]),
], ids=["store's wait", "barrier", "write-back", "its wait", "invalidation"])  # fmt: skip
def test_what_orders_memory_is_missed(before, after, missed):
    """Without it the last workgroup reads what was there before the launch."""
    assert PASS_ON.count(before) == 1
    for backwards, misses in zip((False, True), missed, strict=True):
        faults, values = outcome(PASS_ON.replace(before, after), backwards)
        assert not faults
        assert (values["read"].numpy() != WANT).any() == misses
        # When the launch has ended, all that was stored is there.
        np.testing.assert_array_equal(values["stored"], WANT)


def test_different_values_of_two_workgroups_are_a_race():
    assert outcome(PASS_ON.replace("s3, s2, 9", "s3, s2, 8"))[0] == {"race of workgroups"}
    # The same value is none.
    same = PASS_ON.replace("s3, s2, 9", "s3, s2, 8").replace("v_mov_b32 v3, s2", "v_mov_b32 v3, 1")
    assert not outcome(same)[0]


def test_without_an_atomic_all_see_memory_at_once():
    """Workgroups one after the other, as a launch in which none waits for another."""
    text = PASS_ON.replace("global_atomic_add v5, v4, v5, s[6:7] sc0", "v_mov_b32 v5, s2")
    text = text.replace("buffer_wbl2 sc1\n", "").replace("buffer_inv sc1\n", "")
    faults, values = outcome(text.replace("s_cmp_lg_u32 s10, 1", "s_cmp_lg_u32 s10, 2"))
    assert not faults
    np.testing.assert_array_equal(values["read"], WANT)
