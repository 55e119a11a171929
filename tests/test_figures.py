"""The tables and plots of docs/performance.md are those of the rows in benchmarks/results/."""

import figures
import pytest


def test_tables_are_current():
    page = figures.PAGE.read_text()
    assert figures.written(page) == page, "run python benchmarks/figures.py --tables"


@pytest.mark.parametrize("name", figures.PLOTS)
def test_plots_are_current(name):
    _, source = figures.PLOTS[name]
    drawn = (figures.IMAGES / f"{name}.svg").read_text()
    assert f"rows {figures.digest(source)}" in drawn, "run python benchmarks/figures.py"


def region_rows(tokens="8", **us):
    """One shape of 16 heads; the candidates not named take 10 us, the small kernel 1 us."""
    times = {"triton": 2.0, "plain": 1.0, "plain+triton": 4.0, **dict.fromkeys(figures.PEERS, 10.0)}
    shape = {"tokens": tokens, "heads": "16", "floor_us": "1.5"}
    return [{**shape, "candidate": c, "p50_us": str(us)} for c, us in {**times, **us}.items()]


def test_region_means_and_losses():
    lines = figures.region_table([*region_rows(flashinfer=6.0), *region_rows("32", flashinfer=8.0)])
    assert lines[2] == "| 16 | 3.46x (3.00, 4.00) | 2.31x (2.00, 2.67) |"
    assert lines[-1] == "Shapes where the best of the others is faster: none."
    lines = figures.region_table(region_rows(flashinfer=2.5))
    assert lines[-1] == "Shapes where the best of the others is faster: T=8, H=16."


def test_a_decode_peer_of_one_type_has_no_line_for_the_other():
    shape = {"batch": "1", "context": "1024", "ragged": "0", "heads": "16"}
    rows = [
        {**shape, "dtype": dtype, "candidate": candidate, "p50_us": us}
        for dtype, candidate, us in (
            ("bf16", "ours", "6"), ("bf16", "fa3", "12"),
            ("fp8", "ours", "5"), ("fp8", "flashmla", "4"),
        )
    ]  # fmt: skip
    assert figures.attention_means(rows)[2:] == [
        "| 16, bf16 | FlashAttention 3 | 2.00x | 2.00x | 2.00x | 0 of 1 |",
        "| 16, fp8 | FlashMLA | 0.80x | 0.80x | 0.80x | 1 of 1 |",
    ]
