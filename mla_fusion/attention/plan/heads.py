"""The heads of a work item: those that it cannot hold are folded into the batch, as AITER does."""

import dataclasses

MAX_ROWS = 128  # heads x query tokens of the largest tile of the portable kernel's work items


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Heads of the query, padded to `padded`, in blocks of `per_work`: a sequence becomes `fold`
    sequences, head block f with the heads f * per_work ... (f + 1) * per_work - 1."""

    padded: int
    per_work: int

    @property
    def fold(self) -> int:
        """Head blocks of a sequence: sequence, block = divmod(batch_idx, fold)."""
        return self.padded // self.per_work


def layout(heads: int, max_query_len: int, per_work: int | None = None) -> HeadLayout:
    """The layout of the portable kernel, for sequences of up to `max_query_len` query rows.

    Heads are padded to a multiple of 16, the height of a matrix instruction; up to 8 of several
    query rows to 8, so that two rows fill it. Unless `per_work`, a multiple of 16, says otherwise,
    a work item holds them all if they are 64 at most, else the largest block of 64, 32 or 16 that
    divides them; and fewer where its tile would exceed `MAX_ROWS`."""
    padded = 8 if heads <= 8 and max_query_len > 1 else -(-heads // 16) * 16
    if per_work is not None:
        if per_work < 16 or per_work % 16:
            raise ValueError(f"heads_per_work must be a multiple of 16, got {per_work}")
        return HeadLayout(-(-heads // per_work) * per_work, per_work)
    blocks = (min(padded, 64), 32, 16)
    fits = (n for n in blocks if padded % n == 0 and n * max_query_len <= MAX_ROWS)
    return HeadLayout(padded, next(fits, min(padded, 16)))


def aiter_layout(heads: int, max_query_len: int, kind: str, arch: str) -> HeadLayout:
    """The layout of AITER's persistent kernel for a `kind` of `selection.aiter_verdict`: padded to
    16 n, and folded to 16 unless its planner (ROCm/aiter v0.1.20) has the count as a native one."""
    padded = -(-heads // 16) * 16
    native = padded == 16 or {
        ("gfx942", "fp8"): padded == 128 or (padded == 64 and max_query_len == 1),
        ("gfx950", "fp8"): padded in (32, 64, 128),
        ("gfx950", "bf16"): True,
        (arch, "bf16 over fp8"): True,
    }.get((arch, kind), False)
    return HeadLayout(padded, padded if native else 16)
