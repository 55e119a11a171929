"""A few instructions on one wave, from registers that a test chooses to those they leave."""

import ctypes

import numpy as np

from tests.amd import assembly, encode, execute

_SCALARS, _VECTORS, _LANES = 129, 768, 64


class Wave:
    """One wave with its LDS and the arrays it may read or write; registers are numpy arrays.

    s: scalars (106 and 107 are VCC, 126 and 127 EXEC, 128 SCC); v: vectors by lanes, from 512 on
    the accumulators.
    """

    def __init__(self, lds=256, readable=(), writable=(), number=0):
        self.bytes = np.zeros(execute.function("size_of_wave", ctypes.c_uint64)(), np.uint8)
        words = self.bytes.view(np.uint32)
        self.s = words[:_SCALARS]
        self.v = words[_SCALARS:][: _VECTORS * _LANES].reshape(_VECTORS, _LANES)
        self.mode, self.pc, _, self.number = np.split(words[_SCALARS + _VECTORS * _LANES :][:4], 4)
        self.number[:] = number
        self.set_pair(126, 2**64 - 1)
        self.lds = np.zeros(lds, np.uint8)
        self.tags = np.zeros(lds * execute.function("size_of_tag", ctypes.c_uint64)(), np.uint8)
        arrays = [(array, 0) for array in readable] + [(array, 1) for array in writable]
        regions = [
            execute.Region(array.ctypes.data, array.ctypes.data + array.nbytes, 1, rights)
            for array, rights in arrays
        ]
        self.kept = arrays
        self.regions = (execute.Region * max(1, len(regions)))(*regions)
        self.machine = execute.Machine(
            lds=self.lds.ctypes.data,
            tags=self.tags.ctypes.data,
            regions=ctypes.addressof(self.regions),
            region_count=len(regions),
            lds_size=lds,
            limit=10_000,
            seed=1,
        )

    def set_pair(self, index, value):
        self.s[index : index + 2] = value & 0xFFFFFFFF, value >> 32

    def run(self, *lines):
        """Execute lines of assembly; returns the names of the faults."""
        instructions, labels = [], {}
        for number, line in enumerate((*lines, "s_endpgm"), 1):
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
            else:
                mnemonic, _, rest = line.partition(" ")
                instructions.append(assembly.instruction(number, mnemonic, rest))
        code = (encode.Instruction * len(instructions))(
            *(encode.encode(each, labels) for each in instructions)
        )
        self.pc[:] = 0
        address = ctypes.c_void_p(self.bytes.ctypes.data)
        execute.function("run_alone")(ctypes.byref(self.machine), code, address)
        faults = self.machine.faults
        return {name for name, count in zip(execute.FAULTS, faults, strict=True) if count}
