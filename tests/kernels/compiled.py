"""Compile a Triton kernel for a GPU that is not installed, and read its machine code.

Triton has code generators, assemblers and disassemblers for both vendors; nothing runs.
"""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from tests.gpus import AMD, NVIDIA, described

# The GPUs on which vLLM serves MLA.
TARGETS = {name: GPUTarget("cuda", int(name[3:]), 32) for name in NVIDIA}
TARGETS |= {name: GPUTarget("hip", name, 64) for name in AMD}
LDS = {name: described(name).shared_memory for name in TARGETS}
# Triton has none before sm_89.
FP8 = dict.fromkeys([*NVIDIA, *AMD][2:], torch.float8_e4m3fn) | {"gfx942": torch.float8_e4m3fnuz}

ORDERED = r"\b(?:global_|buffer_|s_waitcnt |s_)(store|atomic|wbl2|inv(?=\s)|vmcnt\(0\)|barrier)"
ACCESSES = r"\b(LDG|LDGSTS|UTMALDG|STG|ACQBULK|PREEXIT)\b(?:\.\w+)*?(\.128)?(?= |;)"


@dataclasses.dataclass(frozen=True)
class Report:
    """Resources and instructions of one compiled kernel.

    registers: of one thread (vector registers on AMD). spills: spilled registers, or bytes of
    stack on NVIDIA. memory_spills (AMD): spills to memory; scalar registers spill to lanes of a
    vector register. hot_spills, hot_reads, hot_barriers (NVIDIA): accesses for spilled registers,
    loads from shared memory and barriers in the innermost loop with matrix instructions. shared:
    bytes of shared memory (LDS). matrix: kinds of matrix instructions. fp8_converts: packed
    conversions to fp8. wide_loads: 16-byte global loads. narrow_loads: global loads of 2 bytes or
    fewer. contractions: fused multiply-adds of fp32. bulk_copies: loads by TMA. product_waits
    (NVIDIA): waits for asynchronous products, one behind each if it makes them serial. order
    (NVIDIA): accesses to global memory (with .128 if so wide) and instructions of programmatic
    launch, in program order, `before_products` of them before the first product. sync: stores to
    global memory and what orders them, in program order.
    """

    registers: int
    spills: int
    shared: int
    matrix: tuple[str, ...]
    fp8_converts: int
    wide_loads: int
    narrow_loads: int
    contractions: int
    hot_spills: int = 0
    hot_reads: int = 0
    hot_barriers: int = 0
    memory_spills: int = 0
    bulk_copies: int = 0
    product_waits: int = 0
    order: tuple[str, ...] = ()
    before_products: int = 0
    sync: tuple[str, ...] = ()


def specialize(target, kernel, arguments, options):
    """The source, and the compiler's options, of a launch with these arguments.

    Triton's own code for a launch says what it knows of each argument: `tt.divisibility`,
    integers of 1 and, on AMD, `tt.pointer_range` of a tensor whose storage has at most 2 GiB, to
    which it gives buffer instructions.
    """
    backend = make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    chosen, signature, constants, attributes = kernel._pack_args(
        backend, options, *bind(*arguments, **options)
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constants, attributes), chosen


def is_one_variant(target, kernel, launches):
    """Whether launches, each its arguments and options, take the same compiled kernel."""
    first, *others = [specialize(target, kernel, *launch)[0] for launch in launches]
    names = "signature", "constants", "attrs"
    return all(getattr(each, n) == getattr(first, n) for each in others for n in names)


def compile_kernel(target, kernel, arguments, options):
    """A kernel compiled for one of `TARGETS`; tensors may be meta tensors."""
    source, chosen = specialize(target, kernel, arguments, options)
    return triton.compile(source, target=TARGETS[target], options=chosen.__dict__)


def compile_report(target, kernel, arguments, options):
    """Compile a kernel, and read its machine code."""
    compiled = compile_kernel(target, kernel, arguments, options)
    if target in AMD:
        return read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, *flags, file.name], capture_output=True, text=True)
            for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
        )
    return read_nvidia(usage.stdout + usage.stderr, sass.stdout, compiled.metadata.shared)


def read_amd(assembly, shared):
    """Report from AMD assembly text."""

    def field(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])

    to_memory = field("vgpr_spill_count") + field("private_segment_fixed_size")
    return Report(
        registers=field("vgpr_count"),
        spills=to_memory + field("sgpr_spill_count"),
        memory_spills=to_memory,
        shared=shared,
        matrix=tuple(sorted(set(re.findall(r"v_mfma_\w+", assembly)))),
        fp8_converts=len(re.findall(r"v_cvt_(?:scalef32_)?pk_fp8_\w+", assembly)),
        wide_loads=len(re.findall(r"(?:global|buffer)_load_dwordx4", assembly)),
        narrow_loads=len(re.findall(r"(?:global|buffer)_load_(?:u|s)?(?:byte|short)", assembly)),
        contractions=len(re.findall(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_(?:legacy_)?f32", assembly)),
        sync=tuple(re.findall(ORDERED, assembly)),
    )


def read_nvidia(usage, sass, shared):
    """Report from the text of cuobjdump -res-usage and of nvdisasm."""
    inner, first = hot_loop(sass), r"\bHMMA\b" if "HMMA" in sass else r"\bFFMA\b"
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Report(
        registers=registers,
        spills=stack + len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=shared,
        matrix=tuple(sorted(set(re.findall(r"\b((?:UTC)?[HQ]G?MMA)\b", sass)))),
        fp8_converts=len(re.findall(r"F2FP\.\S*E4M3", sass)),
        wide_loads=len(re.findall(r"(?:LDG|LDGSTS)\.E\S*\.128", sass)),
        narrow_loads=len(re.findall(r"LDG\.E\.[US](?:8|16)\b", sass)),
        contractions=len(re.findall(r"\bFFMA\b", sass)),
        hot_spills=len(re.findall(r"\b(?:LDL|STL)\b", inner)),
        hot_reads=len(re.findall(r"\bLDSM?\b", inner)),
        hot_barriers=len(re.findall(r"\bBAR\b", inner)),
        product_waits=len(re.findall(r"\bWARPGROUP\.DEPBAR\b", sass)),
        bulk_copies=len(re.findall(r"\bUTMALDG\b", sass)),
        before_products=len(re.findall(ACCESSES, re.split(first, sass)[0])),
        order=tuple(name + wide for name, wide in re.findall(ACCESSES, sass)),
        sync=tuple(re.findall(r"\b(STG|BAR|ATOMG|MEMBAR\.\w+\.GPU|CCTL\.IVALL)\b", sass)),
    )


def hot_loop(sass):
    """The innermost loop with matrix instructions, empty if there is none."""
    lines = sass.split("\n")
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        begin = labels.get(jump[1], end) if jump else end
        body = lines[begin:end]
        if any(re.search(r"\b(?:UTC)?[HQ]G?MMA\b", each) for each in body):
            loops.append(body)
    return "\n".join(min(loops, key=len, default=[]))
