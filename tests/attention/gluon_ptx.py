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


def combine(a, b, c, table):
    """The one function of three registers that is used."""
    assert table == 0xEA
    return a & b | c


RUN = {
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": combine,
    "prmt.b32": permute,
    "cvt.rn.f16x2.e4m3x2": convert,
}


def assemble(code, outputs, values):
    """The outputs $0, $1, ... of `code`, as int16, for int16 `values`, two in each register."""
    packed = values.reshape(-1, 2).long() & 0xFFFF
    names = {f"${outputs}": packed[:, 0] | packed[:, 1] << 16}
    for line in code.strip("{} \n").split(";"):
        match = re.match(r"\s*(\S+)\s+(.*)", line)
        if match is None or match[1] == ".reg":
            continue
        if match[1] == "mov.b32":
            low, high, source = re.findall(r"\w+", match[2])
            names[low], names[high] = names[source] & 0xFFFF, names[source] >> 16
            continue
        target, *given = match[2].replace(" ", "").split(",")
        given = [names[x] if x in names else int(x, 0) for x in given]
        names[target] = RUN[match[1]](*given) & 0xFFFFFFFF
    halves = [
        torch.stack([names[f"${i}"] & 0xFFFF, names[f"${i}"] >> 16], 1) for i in range(outputs)
    ]
    return [each.to(torch.int16).reshape(values.shape) for each in halves]
