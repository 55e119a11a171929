"""The decode kernels, and the epilogue behind one, against float64 attention. All bytes that no
sequence owns are NaN, tails of last pages included, and entries of a block table after the end of a
sequence name no block. Plans, outputs and partial results are full of NaN too."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch

from mla_fusion.attention import Epilogue, PersistentDecodePlan
from mla_fusion.attention import triton as provider
from mla_fusion.attention.card import Card, Shape
from mla_fusion.attention.plan.epilogue import GROUP
from mla_fusion.attention.plan.inputs import Inputs, validate
from mla_fusion.measure import outcome
from mla_fusion.measure.decode_peers import TOLERANCE
from mla_fusion.measure.distances import exact_attention, make_epilogue, make_w_uv
from mla_fusion.measure.outcome import Outcome

BF16 = torch.bfloat16
SCALE = 0.5  # of an fp8 query, and of an fp8 cache
# fp8 products of Hopper sum up in fewer bits than fp32 has.
LSE_BF16, LSE_FP8 = 1e-5, 2e-3
ROUNDED = 3.2e-2  # relative distance of a result in e4m3: three bits of mantissa move it by 2.6e-2
MOST_SCORES = 2**25  # of a sequence in float64, so that a GPU of 16 GiB holds them
LONGEST = 100_000  # KV tokens of a sequence
HUGE = 2**32 + 2**30  # bytes of a cache
NEEDED = 12 * 2**30  # bytes that must be free for it


class Bench(outcome.Bench):
    """A shape, decoded by the kernel of a card, or by the kernel that is chosen for it."""

    def __init__(self, card: Card | None, shape: Shape, longest: int, device: str) -> None:
        torch.manual_seed(0)
        self.bound = TOLERANCE if shape.quantization == "none" else ROUNDED
        self.lse_bound = LSE_FP8 if shape.kv.itemsize == 1 else LSE_BF16
        self.card, self.shape, self.device, self.longest = card, shape, device, longest
        heads, latent, page, width = shape.heads, shape.latent, shape.page, shape.width
        self.batch = shape.batch or len(self.lengths())
        self.rows = self.batch * shape.queries
        pages = [-(-n // page) for n in self.lengths()]
        self.blocks, entry = sum(pages) + 2, width + shape.gap
        # Blocks are whole entries apart, as the tensor copy engine wants them.
        step = (page + bool(shape.gap)) * entry
        if shape.huge:
            self.blocks = max(self.blocks, HUGE // (step * shape.kv.itemsize))
        self.storage = torch.empty(self.blocks * step, dtype=shape.kv, device=device)
        self.cache = self.storage.as_strided((self.blocks, page, width), (step, entry, 1))
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.table = torch.empty(self.batch, max(pages) + 1, **integers)
        self.starts = torch.zeros(self.batch + 1, **integers)
        self.lens = torch.zeros(self.batch, **integers)
        q = torch.randn(self.rows, heads, entry, device=device)
        self.q = q.to(shape.q)[..., shape.gap :]
        self.wide = q.new_empty(self.rows, heads, latent + shape.gap, dtype=BF16)
        self.out, self.lse = self.wide[..., :latent], q.new_empty(self.rows, heads)
        self.scale = q.new_full((1,), SCALE)
        # A CPU has no number of CTAs of its own.
        settings: dict[str, Any] = {"ctas": 5, "overhead": 1}
        if device != "cpu":
            settings = provider.plan_settings(heads, shape.queries, shape.kv, width, device)
        self.plan = PersistentDecodePlan.allocate(
            max_batch=max(16, shape.batch), max_query_len=shape.queries, num_heads=heads,
            q_dtype=shape.q, kv_dtype=shape.kv, device=device, v_head_dim=latent, **settings,
        )  # fmt: skip
        self.epilogue: Epilogue | None = None
        if shape.values:
            w_uv = make_w_uv(heads, latent, shape.values, device)
            self.epilogue = make_epilogue(w_uv, self.rows, shape.quantization)

    def lengths(self) -> list[int]:
        """Hostile KV lengths: none, one, around a page and a tile, and a long one."""
        page, most = self.shape.page, self.longest
        short = [0, 1, page - 1, page, page + 1, 63, 64, 65, 5 * page + 3]
        return [*short * max(1, -(-self.shape.batch // len(short))), most]

    def draw(self, rng: random.Random, ragged: bool) -> tuple[list[int], list[int]]:
        """Query rows and KV tokens of each sequence. ragged: some have fewer rows, or none."""
        lengths, queries = self.lengths(), self.shape.queries
        rng.shuffle(lengths)
        if not ragged:
            lengths.sort(reverse=True)
        lengths = lengths[: self.batch]
        if ragged and not self.shape.batch:
            lengths = [rng.randint(0, length) for length in lengths]
        # An epilogue reads the rows of padding too, so a step with one has none.
        if not ragged or self.epilogue is not None:
            return [queries] * self.batch, lengths
        rows = [rng.choice((queries, rng.randint(0, queries))) for _ in lengths]
        rows[-1] = lengths[-1] = 0
        return rows, lengths

    def fill(self, rng: random.Random, ragged: bool) -> None:
        """Sequences at random places; NaN everywhere else."""
        rows, lengths = self.drawn = self.draw(rng, ragged)
        shape, page = self.shape, self.shape.page
        nan = 0x80 if shape.kv == torch.float8_e4m3fnuz else 0xFF
        self.storage.view(torch.uint8).fill_(nan)
        counts = [-(-n // page) for n in lengths]
        order = torch.randperm(self.blocks, device=self.device)[: sum(counts)].split(counts)
        self.table.fill_(2**30)
        for b, (length, pages) in enumerate(zip(lengths, order, strict=True)):
            self.table[b, : len(pages)] = pages.int()
            at = torch.arange(length, device=self.device)
            keys = torch.randn(length, shape.width, device=self.device)
            # As bytes, because torch may have no such operation on fp8.
            stored = keys.to(shape.kv).view(torch.uint8)
            self.cache.view(torch.uint8)[pages[at // page], at % page] = stored
        self.starts.copy_(torch.tensor([0, *rows]).cumsum(0))
        self.lens.copy_(torch.tensor(lengths))
        self.clear()

    def clear(self) -> None:
        """NaN in all that a launch writes, but the plan's indices."""
        for tensor in (self.wide, self.lse, self.plan.partial_output, self.plan.partial_lse):
            tensor.fill_(torch.nan)
        if self.epilogue is not None:
            self.epilogue.out.view(torch.uint8).fill_(0xFF)
            if self.epilogue.quantization.startswith("group"):
                self.epilogue.scale.fill_(torch.nan)  # type: ignore[union-attr]

    def step(self, _: int = 0) -> None:
        """Plan and decode, for as many rows as there may be."""
        self.plan.refresh(
            qo_indptr=self.starts, seq_lens=self.lens, num_tokens=self.rows,
            max_query_len=self.shape.queries,
        )  # fmt: skip
        self.launch()

    def launch(self) -> None:
        """Decode by the plan of this step. An epilogue follows the kernel that is chosen."""
        given = Inputs(
            self.q, self.cache, self.plan, self.table, self.shape.width**-0.5, self.scale,
            self.scale, self.out, self.lse, self.epilogue,
        )  # fmt: skip
        validate(given)
        if self.card is None:
            provider.persistent_mla_decode(given)
            return
        provider.check_types(given.q, given.kv_cache, self.shape.latent)
        if why := self.card.why_not(given):
            raise ValueError(f"{self.card.name} does not take {self.shape.name}: {why.detail}")
        self.card.module.launch_of(given).start()
        provider.merge(given)
        self.plan.fresh = False

    def results(self) -> list[torch.Tensor]:
        return [self.out if self.epilogue is None else self.epilogue.out, self.lse]

    def compared(self) -> Iterator[tuple[torch.Tensor, ...]]:
        shape, start = self.shape, 0
        of_keys, of_q = (SCALE if dtype.itemsize == 1 else 1.0 for dtype in (shape.kv, shape.q))
        for b, (count, length) in enumerate(zip(*self.drawn, strict=True)):
            at = slice(start, start + count)
            start += count
            if not count:
                continue
            pages = self.table[b, : -(-length // shape.page)].long()
            keys = self.cache[pages].flatten(0, 1)[:length].double() * of_keys
            want, lse = exact_attention(self.q[at].double() * of_q, keys, shape.latent)
            got = self.out[at]
            if (behind := self.epilogue) is not None:
                want = torch.einsum("thl,hlv->thv", want, behind.w_uv.double()).flatten(1)
                got, scale = behind.out[at].double(), behind.scale
                if scale is not None:
                    of_groups = scale if scale.dim() == 1 else scale[at, :, None]
                    got = (got.unflatten(1, (-1, GROUP)) * of_groups).flatten(1)
            yield got, want, self.lse[at], lse

    def notes(self) -> list[str]:
        behind = self.out[sum(self.drawn[0]) :]
        found = []
        if self.epilogue is None and not behind.isnan().all():
            found.append("rows after the batch are written")
        if not self.wide[..., self.shape.latent :].isnan().all():
            found.append("columns beside a row are written")
        return found


def check(
    card: Card | None,
    shapes: list[Shape],
    device: str = "cuda",
    longest: int = LONGEST,
    repeats: int = 3,
) -> Iterator[Outcome]:
    """The cases of each shape, decoded as in `Bench`. longest: most KV tokens of a sequence."""
    for shape in shapes:
        if shape.huge and torch.cuda.mem_get_info()[0] < NEEDED:
            shape = dataclasses.replace(shape, huge=False)
        most = min(longest, MOST_SCORES // (shape.heads * shape.queries))
        yield from Bench(card, shape, most, device).cases(shape.name, repeats, replays=2)
        torch.cuda.empty_cache()  # for the kernels that are checked beside this one
