"""The sparse decode against float64 attention, over every kind of cache. Entries are made with the
keys that they stand for: nothing here reads one. Every entry that no token lists is NaN; slots of
-1 are anywhere in a row, and columns that do not count name no slot."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import torch

from mla_fusion import gpu
from mla_fusion.attention import cards
from mla_fusion.attention.card import Decodes
from mla_fusion.attention.plan import layouts
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.plan.layouts import WIDE, CacheLayout
from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from mla_fusion.measure import outcome
from mla_fusion.measure.decode_peers import TOLERANCE
from mla_fusion.measure.distances import exact_attention
from mla_fusion.measure.outcome import Outcome

BF16 = torch.bfloat16
PAGE, NOWHERE = 64, 2**30
SCALE = 0.5  # of an fp8 query, and of an fp8 cache without a layout
LSE_BF16, LSE_FP8 = 1e-4, 2e-3  # a query in fp8 is summed in fewer bits than fp32 has


@dataclasses.dataclass(frozen=True)
class Variant:
    """The properties that a kernel is compiled for. layout: of a cache of bytes. q, kv: types;
    columns: of each scope. latent: summed values of a cache without a layout, which has WIDE
    rotated ones too."""

    heads: int
    columns: tuple[int, ...] = (2048,)
    layout: CacheLayout | None = None
    q: torch.dtype = BF16
    kv: torch.dtype = BF16
    sink: bool = True
    latent: int = 512
    tokens: int = 16

    @property
    def name(self) -> str:
        cache = str(self.kv)[6:] if self.layout is None else f"{self.layout.bytes} bytes"
        return f"{self.heads} heads, {cache}, columns {'+'.join(map(str, self.columns))}"


def make_bank(variant: Variant, count: int, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Entries: the bytes [count, n] of each in one or two parts, and the keys that they are, in
    float64. In byte caches codes reach the largest, and scales differ by up to 8."""
    layout = variant.layout
    if layout is None:
        stored = torch.randn(count, variant.latent + WIDE, device=device).to(variant.kv)
        scale = SCALE if variant.kv.itemsize == 1 else 1.0
        return [stored.view(torch.uint8)], stored.double() * scale
    groups = layout.quantized // layout.group
    numbers = 150 * torch.randn(count, layout.quantized, device=device)
    codes = numbers.clamp(-448, 448).to(variant.kv)
    rotated = torch.randn(count, WIDE, device=device).to(BF16)
    exponents = torch.randint(-9, -6, (count, groups), device=device)
    data, wide = codes.view(torch.uint8), rotated.view(torch.uint8)
    if layout.behind:
        scales = torch.exp2(exponents.double())
        padding = 0, layouts.EXPONENTS - groups
        stored = torch.nn.functional.pad((exponents + 127).to(torch.uint8), padding)
        parts = [torch.cat((data, wide), 1), stored]
    else:
        stored = torch.exp2(exponents + torch.rand(count, groups, device=device)).float()
        scales = stored.double()
        parts = [torch.cat((data, stored.view(torch.uint8), wide), 1)]
    values = (codes.double().unflatten(1, (groups, -1)) * scales[:, :, None]).flatten(1)
    return parts, torch.cat((values, rotated.double()), 1)


class Bench(outcome.Bench):
    """The tensors and cases of a variant."""

    bound = TOLERANCE

    def __init__(self, variant: Variant, device: str, count: int = 4096) -> None:
        torch.manual_seed(0)
        self.variant, self.device, self.count = variant, device, count
        self.lse_bound = LSE_FP8 if variant.kv.itemsize == 1 else LSE_BF16
        layout, tokens, heads = variant.layout, variant.tokens, variant.heads
        self.banks = [make_bank(variant, count, device) for _ in variant.columns]
        latent = variant.latent if layout is None else layout.latent
        self.width = variant.latent + WIDE if layout is None else layout.width
        self.q = torch.randn(tokens, heads, self.width, device=device).to(variant.q)
        self.sink = 6 + 2 * torch.randn(heads, device=device) if variant.sink else None
        self.scopes = []
        for (parts, _), columns in zip(self.banks, variant.columns, strict=True):
            bytes_ = sum(part.shape[1] for part in parts)
            cache = torch.empty(count // PAGE, PAGE, bytes_, dtype=torch.uint8, device=device)
            # Rows are 16 bytes apart, as a compiled kernel expects them.
            wide = torch.empty(tokens, -(-columns // 64) * 64, dtype=torch.int32, device=device)
            of_type = cache if layout is not None else cache.view(variant.kv)
            self.scopes.append(Scope(of_type, wide[:, :columns], layout))
        self.lengths = [torch.zeros(tokens, dtype=torch.int32, device=device) for _ in self.scopes]
        self.scratch = sparse_scratch(
            max_tokens=32, num_heads=heads, widths=variant.columns, q_dtype=variant.q,
            kv_dtype=variant.kv, device=device, v_head_dim=latent, layout=layout,
            ctas=5 if device == "cpu" else None,
        )  # fmt: skip
        self.out = torch.empty(tokens, heads, latent, device=device, dtype=BF16)
        self.lse = torch.empty(tokens, heads, device=device)
        self.scale = torch.full((1,), SCALE, device=device)

    def fill(self, rng: random.Random, ragged: bool) -> None:
        """Other lists and lengths, and NaN in every entry that they do not name."""
        for scope, (parts, _), length in zip(self.scopes, self.banks, self.lengths, strict=True):
            table, columns = scope.table, scope.table.shape[1]
            table.random_(0, self.count)
            holes = torch.rand(table.shape, device=self.device)
            table[holes < rng.choice((0, 0.1, 0.5))] = -1
            table[0] = -1
            if len(table) > 2:
                table[1] = rng.randrange(self.count)
            length.random_(0, columns + 1)
            length[-1], length[0] = 0, columns
            counted = torch.arange(columns, device=self.device) < length[:, None]
            table[~counted] = NOWHERE
            listed = torch.zeros(self.count, dtype=torch.bool, device=self.device)
            listed[table[counted & (table >= 0)].long()] = True
            spoilt = [torch.where(listed[:, None], part, 0xFF) for part in parts]
            pages = [part.reshape(self.count // PAGE, -1) for part in spoilt]
            raw = scope.kv_cache.view(torch.uint8)
            raw.copy_(torch.cat(pages, 1).view(raw.shape))
        self.clear()

    def clear(self) -> None:
        plan = self.scratch.plan
        for tensor in (self.out, self.lse, plan.partial_output, plan.partial_lse):
            tensor.fill_(torch.nan)

    def step(self, _: int = 0) -> None:
        self.scratch.refresh(len(self.q), self.lengths)
        lse = sparse_mla_decode(
            self.q, self.scopes, self.scratch, softmax_scale=self.width**-0.5, sink=self.sink,
            q_scale=self.scale, kv_scale=self.scale if self.variant.layout is None else None,
            out=self.out, return_lse=True,
        )[1]  # fmt: skip
        assert lse is not None
        self.lse.copy_(lse)

    launch = step

    def results(self) -> list[torch.Tensor]:
        return [self.out]

    def compared(self) -> Iterator[tuple[torch.Tensor, ...]]:
        layout = self.variant.layout
        of = self.variant
        decodes = Decodes(of.heads, 1, of.kv, 0, len(self.scopes), layout)
        rounds = layout is not None and cards.planned(gpu.of(self.device), decodes).rounds
        by = SCALE if of.q.itemsize == 1 else 1.0
        for token, q in enumerate(self.q.double() * by):
            found = []
            for scope, (_, keys), each in zip(self.scopes, self.banks, self.lengths, strict=True):
                slots = scope.table[token, : int(each[token])]
                keys = keys[slots[slots >= 0].long()]
                found.append(keys.to(BF16).double() if rounds else keys)
            latent = self.out.shape[2]
            want, lse = exact_attention(q[None], torch.cat(found), latent, self.sink)
            yield self.out[token : token + 1], want, self.lse[token : token + 1], lse


def check(variants: Sequence[Variant], device: str = "cuda", steps: int = 4) -> Iterator[Outcome]:
    """The cases of each variant."""
    for variant in variants:
        yield from Bench(variant, device).cases(variant.name, repeats=3, replays=steps)


def variants(kind: str, fp8: torch.dtype) -> list[Variant]:
    """The variants of a cache: "bf16", "fp8", "656 bytes" (DeepSeek-V3.2) or "584 bytes" (V4)."""
    two = (128, 1024)
    if kind == "bf16":
        return [Variant(16), Variant(64, two), Variant(8, (70,), sink=False)]
    if kind == "fp8":
        return [Variant(n, c, None, fp8, fp8) for n, c in ((16, (2048,)), (128, two))]
    if kind == "656 bytes":
        layout, shapes = layouts.FP8_DS_MLA, [(16, (2048,)), (128, (512,)), (8, (70,)), (64, two)]
    else:
        layout, shapes = layouts.FP8_DS_MLA_V4, [(8, (70,)), (16, two), (128, (512,))]
    return [Variant(n, columns, layout, BF16, fp8) for n, columns in shapes]
