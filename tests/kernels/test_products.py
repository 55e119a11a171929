"""What is found in machine code that touches registers of products under way: planted bugs."""

import dataclasses

import pytest

pytest.importorskip("triton")

from tests.kernels.products import Instruction, given_back_early, read, touched_early

MULTIPLY = "HGMMA.64x16x16.F32 R24, R4, gdesc[UR4], R24, gsb0"
MORE = "HGMMA.64x16x16.F32 R32, R8, gdesc[UR4], R32, gsb0"
WAIT_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
ARRIVE = "WARPGROUP.ARRIVE"


def code(*lines):
    """Instructions one after the other."""
    parts = [line.partition(" ") for line in lines]
    return [
        Instruction(name, operands, (number + 1,) if number + 1 < len(lines) else ())
        for number, (name, _, operands) in enumerate(parts)
    ]


@pytest.mark.parametrize(
    "lines",
    [
        (ARRIVE, MULTIPLY, WAIT_ALL, "FMUL R24, R24, R2"),
        (ARRIVE, MULTIPLY, ARRIVE, MORE, WAIT_BUT_ONE, "LOP3.LUT R4, R5, R24, RZ, 0xc0", WAIT_ALL),
        (ARRIVE, MULTIPLY, "FMUL R40, R4, R41", "STL [R1+0x4], R7", WAIT_ALL),
        ("FMUL R24, R24, R2", ARRIVE, "FMUL R40, R40, R2", MULTIPLY, WAIT_ALL),
    ],
)
def test_right(lines):
    assert touched_early(code(*lines)) == []


@pytest.mark.parametrize(
    "lines",
    [
        (ARRIVE, MULTIPLY, "FMUL R24, R24, R2", WAIT_ALL),
        (ARRIVE, MULTIPLY, "MOV R40, R31", WAIT_ALL),
        (ARRIVE, MULTIPLY, "STL [R1+0x4], R25", WAIT_ALL),
        (ARRIVE, MULTIPLY, "STL.128 [R1+0x4], R20", "STL.128 [R1+0x4], R22", WAIT_ALL),
        (ARRIVE, MULTIPLY, "LDL.64 R6, [R1+0x4]", WAIT_ALL),
        (ARRIVE, MULTIPLY, "LDSM.16.MT88.4 R0, [R40+UR4]", "LDSM.16.MT88.4 R1, [R40]", WAIT_ALL),
        (ARRIVE, MULTIPLY, ARRIVE, MORE, WAIT_BUT_ONE, "MOV R8, R2", WAIT_ALL),
        (MULTIPLY, WAIT_ALL),
        (ARRIVE, "MOV R4, R2", MULTIPLY, WAIT_ALL),
        (ARRIVE, MULTIPLY, ARRIVE, MORE.replace("R8", "R28"), WAIT_ALL),
    ],
)
def test_wrong(lines):
    assert len(touched_early(code(*lines))) == 1


def test_every_path_is_followed():
    found = code(ARRIVE, MULTIPLY, "BRA `(.L_x_1)", WAIT_ALL, "EXIT", "MOV R40, R24", "EXIT")
    found[4] = dataclasses.replace(found[4], follows=())
    assert touched_early(found) == []
    found[2] = dataclasses.replace(found[2], predicate="@P0", follows=(3, 5))
    assert touched_early(found) == ["5: MOV R40, R24: it touches registers of products under way"]


def test_loads_that_a_warp_has_not_waited_for():
    found = code(
        "LDSM.16.M88.4 R4, [R2]", "LDSM.16.M88.4 R8, [R2]", "BAR.SYNC 0x2, 0x80",
        "SYNCS.ARRIVE.TRANS64 RZ, [R3], RZ",
    )  # fmt: skip
    # The first has the scoreboard of the second.
    found[1] = dataclasses.replace(found[1], scoreboard=3)
    assert given_back_early(found) == [
        "3: SYNCS.ARRIVE.TRANS64 RZ, [R3], RZ: matrices are being loaded"
    ]
    found[2] = dataclasses.replace(found[2], waits=1 << 2)
    assert len(given_back_early(found)) == 1
    found[2] = dataclasses.replace(found[2], waits=1 << 3)
    assert given_back_early(found) == []


def test_the_text_of_the_disassembler():
    text = """
.L_x_7:
        /*02320*/                   LDSM.16.MT88.4 R168, [R188+UR13] ;      /* 0x0000000dbca8783b */
                                                                          /* 0x000e220008000200 */
        /*02330*/              @!P0 BRA `(.L_x_7) ;                         /* 0x000000000010794d */
                                                                          /* 0x001fea0003800000 */
"""
    load, jump = read(text)
    assert (load.name, load.operands) == ("LDSM.16.MT88.4", "R168, [R188+UR13]")
    assert (load.scoreboard, load.follows) == (0, (1,))
    assert (jump.predicate, jump.waits, jump.follows) == ("@!P0", 1, (0,))
