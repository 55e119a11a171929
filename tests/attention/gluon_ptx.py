"""Runs inline PTX of kernels in Gluon on a CPU: moves of bits, and conversions of e4m3."""

import re

import torch


def convert(codes):
    """Two e4m3 in the low bytes of `codes` as two fp16."""
    two = torch.stack([codes & 0xFF, codes >> 8 & 0xFF], -1).to(torch.uint8)
    halves = two.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def permute(a, b, order):
    """Four of the bytes of two registers."""
    both = [each >> 8 * i & 0xFF for each in (a, torch.as_tensor(b)) for i in range(4)]
    return sum(both[order >> 4 * i & 0xF] << 8 * i for i in range(4))


def to_bf16(high, low):
    """Two fp32, or their bits, as two bf16."""
    both = (x if x.is_floating_point() else x.int().view(torch.float32) for x in (high, low))
    high, low = (each.bfloat16().view(torch.int16).long() & 0xFFFF for each in both)
    return low | high << 16


RUN = {
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
    "prmt.b32": permute,
    "cvt.rn.f16x2.e4m3x2": convert,
    "cvt.f32.f16": lambda a: a.to(torch.int16).view(torch.float16).float(),
    "mul.f32": lambda a, b: a * b,
    "cvt.rn.bf16x2.f32": to_bf16,
}


def assemble(code, outputs, *values):
    """The outputs $0, $1, ... of `code` for integers, of which a register holds 32 bits."""
    names = {}
    for i, each in enumerate(values, outputs):
        parts = each.contiguous().flatten().view(torch.int32).long() & 0xFFFFFFFF
        names[f"${i}"] = parts
    for line in code.strip("{} \n").split(";"):
        match = re.match(r"\s*(\S+)\s+(.*)", line)
        if match is None or match[1] == ".reg":
            continue
        if match[1] == "mov.b32":
            *parts, source = re.findall(r"[$\w]+", match[2])
            if len(parts) == 1:
                names[parts[0]] = names[source].to(torch.int32).view(torch.float32)
            else:
                names |= zip(parts, (names[source] & 0xFFFF, names[source] >> 16), strict=True)
            continue
        target, *given = match[2].replace(" ", "").split(",")
        given = [names[x] if x in names else int(x, 0) for x in given]
        found = RUN[match[1]](*given)
        names[target] = found if found.is_floating_point() else found & 0xFFFFFFFF
    results = (names[f"${i}"].to(torch.int32).view(values[0].dtype) for i in range(outputs))
    return [each.reshape(values[0].shape) for each in results]
