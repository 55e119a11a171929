"""Conversion to fp8 by search, and inputs on which conversions go wrong."""

import numpy as np
import torch


def nearest(x, codes):
    """The code nearest to each of `x`, of all 256 `codes` of an fp8 type; a search in float64.

    It saturates. torch gives only the values of the codes; ties are equal distances.
    """
    values = codes.float().double().numpy()
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(np.abs(values[finite]), kind="stable")]
    result = np.empty(x.shape, np.uint8)
    for i, v in enumerate(x.astype(np.float64)):
        if np.isnan(v):
            result[i] = np.flatnonzero(np.isnan(values))[0]
            continue
        clamped = np.clip(v, values[finite].min(), values[finite].max())
        distance = np.abs(values[order] - clamped)
        best = order[distance == distance.min()]
        if len(best) > 1:
            # Ties go to even codes; of two zeros, to the one with the sign of the input.
            even = [c for c in best if c % 2 == 0]
            best = sorted(even, key=lambda c: bool(c & 0x80) != bool(np.signbit(v)))
        result[i] = best[0]
    return result


def hard_values(codes):
    """fp32 inputs: all fp8 values, their midpoints and neighbours, extremes and random ones."""
    values = codes.float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    around = torch.cat((middle, values, middle.nextafter(middle + 1), middle.nextafter(middle - 1)))
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 465.0, 1e38, -1e38, torch.nan])
    infinite = torch.tensor([torch.inf, -torch.inf])
    random = torch.randn(1024) * torch.exp2(torch.randint(-14, 12, (1024,)).float())
    x = torch.cat((around, extremes, infinite, random))
    return torch.nn.functional.pad(x, (0, 4096 - len(x)))
