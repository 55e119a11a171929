"""The fused region of one MLA layer under torch.compile, without vLLM.

python examples/kernel_alone.py --provider triton

Shapes of one rank of DeepSeek-V3 at tensor-parallel size 8. Prints by how much the
compiled function and the eager one differ.
"""

import argparse

import torch

from mla_fusion.kernels import (
    PROVIDERS,
    ProviderUnavailable,
    fused_mla_decode_prep,
    get_provider,
)

TOKENS, HEADS, HIDDEN = 4, 16, 256
NOPE, ROPE, LATENT = 128, 64, 512
BLOCKS, BLOCK_SIZE, MAX_POSITION = 8, 64, 1024


def inputs(device: str) -> dict[str, torch.Tensor]:
    """Weights, an empty cache and one decode step, random."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).to(device, torch.bfloat16)

    angles = torch.outer(torch.arange(MAX_POSITION), 1e4 ** (-torch.arange(0, ROPE, 2) / ROPE))
    return {
        "hidden": random(TOKENS, HIDDEN),
        "w_q": random(HIDDEN, HEADS * (NOPE + ROPE)),
        "w_kv": random(HIDDEN, LATENT + ROPE),
        "w_uk_t": random(HEADS, NOPE, LATENT),
        "kv_cache": torch.zeros(
            BLOCKS, BLOCK_SIZE, LATENT + ROPE, dtype=torch.bfloat16, device=device
        ),
        "slot_mapping": torch.tensor([0, 64, 65, -1], device=device),  # the last row is padding
        "positions": torch.tensor([0, 7, 8, 0], device=device),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        "scale": torch.ones(1, device=device),
    }


@torch.library.custom_op("example::decode_prep", mutates_args=("kv_cache", "q_out"))
def decode_prep(
    q: torch.Tensor,
    w_uk_t: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    scale: torch.Tensor,
    q_out: torch.Tensor,
    provider: str,
) -> None:
    """One op of the compiled graph: Dynamo does not trace into a kernel's launcher."""
    fused_mla_decode_prep(
        q, w_uk_t, kv_c, k_pe, kv_cache, slot_mapping, positions, cos_sin_cache, scale, scale,
        is_neox=False, q_out=q_out, provider=provider,
    )  # fmt: skip


def step(t: dict[str, torch.Tensor], provider: str) -> torch.Tensor:
    """The query [TOKENS, HEADS, LATENT + ROPE] an MLA decode kernel takes; writes the cache."""
    q = (t["hidden"] @ t["w_q"]).view(TOKENS, HEADS, NOPE + ROPE)
    kv_c, k_pe = (t["hidden"] @ t["w_kv"]).split([LATENT, ROPE], dim=-1)
    q_out = q.new_empty(TOKENS, HEADS, LATENT + ROPE)
    decode_prep(
        q, t["w_uk_t"], kv_c, k_pe, t["kv_cache"], t["slot_mapping"], t["positions"],
        t["cos_sin_cache"], t["scale"], q_out, provider,
    )  # fmt: skip
    return q_out


def main() -> None:
    """Run the step eagerly and compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=PROVIDERS, default="reference")
    options = parser.parse_args()
    try:
        get_provider(options.provider)
    except ProviderUnavailable as error:
        parser.error(str(error))
    device = "cpu" if options.provider == "reference" else "cuda"
    eager, compiled = inputs(device), inputs(device)
    want = step(eager, options.provider)
    got = torch.compile(step, fullgraph=True)(compiled, options.provider)
    for name, a, b in (("query", want, got), ("cache", eager["kv_cache"], compiled["kv_cache"])):
        most = f"{(a - b).abs().max():.2g}"
        print(f"{name} {list(b.shape)} {b.dtype}: compiled and eager differ by {most} at most")
    rows = compiled["kv_cache"].flatten(0, 1).abs().amax(-1).nonzero().flatten()
    print(f"cache rows written: {rows.tolist()}")


if __name__ == "__main__":
    main()
