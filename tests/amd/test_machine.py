"""The machine sees what a wrong kernel does: the library's own, with instructions left out."""

import dataclasses
from unittest import mock

import pytest

pytest.importorskip("triton")

from tests.amd import assembly, compile
from tests.amd.execute import Settings
from tests.amd.test_epilogue import check

NOP = assembly.instruction(0, "s_nop", "0")
launch = compile.launch


def without(name):
    """As `compile.launch`, with nothing in the place of these instructions."""

    def changed(*arguments):
        given = launch(*arguments)
        program = given.kernel.program
        code = tuple(NOP if each.name == name else each for each in program.instructions)
        assert not name or NOP in code
        program = dataclasses.replace(program, instructions=code)
        return dataclasses.replace(given, kernel=dataclasses.replace(given.kernel, program=program))

    return changed


@pytest.mark.parametrize(
    "name, found", [("s_waitcnt", "register without a wait"), ("s_barrier", "LDS race")]
)
def test_what_orders_memory_is_missed(name, found):
    with mock.patch.object(compile, "launch", without(name)), pytest.raises(AssertionError) as seen:
        for backwards in (False, True):
            check("gfx942", settings=Settings(backwards=backwards))
    seen.match(f"(?i){found}")


def test_a_store_elsewhere_is_seen():
    only = mock.patch.dict("tests.amd.provider.WRITABLE", mla_reduce=("lse_ptr",))
    with only, pytest.raises(AssertionError, match="write of"):
        check("gfx942")
