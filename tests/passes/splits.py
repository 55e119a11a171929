"""Ways to split a projection x [T, 2 * H * n] into (query, gate), each [T, H, n] or alike. Both are
views of a value that no op of the graph stores."""

from torch.nn.functional import silu

SPLITS = {
    "unbind": lambda x, bias, h, n: (x + bias).view(-1, 2, h, n).unbind(1),
    "chunk": lambda x, bias, h, n: silu(x).view(-1, 2 * h, n).chunk(2, 1),
    "interleaved": lambda x, bias, h, n: (x * bias).view(-1, h, n, 2).unbind(-1),
    "transposed": lambda x, bias, h, n: (x.t() + bias[:, None]).t().view(-1, 2, h, n).unbind(1),
    "permuted": lambda x, bias, h, n: silu(x).view(-1, n, 2, h).permute(2, 0, 3, 1).unbind(0),
    "expanded": lambda x, bias, h, n: (
        (x + bias).view(-1, 2 * h, 1, n).expand(-1, -1, h, -1).unbind(1)[:2]
    ),
}
