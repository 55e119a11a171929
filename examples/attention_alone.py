"""Persistent MLA decode under torch.compile, without vLLM: one plan, two steps.

python examples/attention_alone.py --provider triton

Three sequences of different lengths; the second step has one more token each. Prints the relative
error against softmax attention in fp32, and how the plan shared the work.
"""

import argparse

import torch

from mla_fusion.attention import (
    PROVIDERS,
    PersistentDecodePlan,
    ProviderUnavailable,
    get_provider,
    persistent_mla_decode,
)

HEADS, LATENT, ROPE, PAGE = 16, 512, 64, 64
LENGTHS = (700, 40, 5)
SCALE = (128 + ROPE) ** -0.5


@torch.library.custom_op("example::decode", mutates_args=("out",))
def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    provider: str,
) -> None:
    """One op of the compiled graph; it finds the plan as a server's op finds that of its step."""
    persistent_mla_decode(
        q, kv_cache, PLANS[0], block_table=block_table, softmax_scale=SCALE, out=out,
        provider=provider,
    )  # fmt: skip


PLANS: list[PersistentDecodePlan] = []


def layer(
    x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, provider: str
) -> torch.Tensor:
    """Prepared queries [3, HEADS, LATENT + ROPE] from x, and their attention [3, HEADS, LATENT]."""
    q = (x @ w).view(-1, HEADS, LATENT + ROPE)
    out = q.new_empty(q.shape[0], HEADS, LATENT)
    decode(q, cache, table, out, provider)
    return out


def softmax_attention(
    x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """The expected result of `layer`, in fp32 and sequence by sequence."""
    q = (x @ w).view(-1, HEADS, LATENT + ROPE).float()
    rows = [
        cache[pages.long()].flatten(0, 1)[:n].float()
        for pages, n in zip(table, lengths, strict=True)
    ]
    return torch.stack(
        [((a @ kv.T) * SCALE).softmax(-1) @ kv[:, :LATENT] for a, kv in zip(q, rows, strict=True)]
    )


def main() -> None:
    """Plan each step once and decode it with the compiled layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=PROVIDERS, default="reference")
    options = parser.parse_args()
    try:
        get_provider(options.provider)
    except ProviderUnavailable as error:
        parser.error(str(error))
    device = "cpu" if options.provider == "reference" else "cuda"
    torch.manual_seed(0)
    batch, pages = len(LENGTHS), -(-(max(LENGTHS) + 1) // PAGE)
    x = torch.randn(batch, 256, device=device, dtype=torch.bfloat16)
    w = torch.randn(256, HEADS * (LATENT + ROPE), device=device, dtype=torch.bfloat16) / 16
    cache = torch.randn(batch * pages, PAGE, LATENT + ROPE, device=device, dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
    PLANS[:] = [
        PersistentDecodePlan.allocate(
            max_batch=batch,
            max_query_len=1,
            num_heads=HEADS,
            q_dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            device=device,
            ctas=8 if device == "cpu" else None,
        )
    ]
    compiled = torch.compile(layer, fullgraph=True)
    for step in range(2):
        lengths = [n + step for n in LENGTHS]
        PLANS[0].refresh(
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            num_tokens=batch,
            max_query_len=1,
        )
        got = compiled(x, w, cache, table, options.provider).float()
        want = softmax_attention(x, w, cache, table, lengths)
        error = (got - want).norm() / want.norm()
        items = PLANS[0].work_indptr.diff().tolist()
        print(f"step {step}: relative error {error:.2g}; work items of each CTA: {items}")


if __name__ == "__main__":
    main()
