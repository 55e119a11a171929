"""The tables and plots of docs/performance.md are those of the rows in benchmarks/results/."""

import figures


def test_tables_are_current():
    page = figures.PAGE.read_text()
    assert figures.written(page) == page, "run python benchmarks/figures.py --tables"


def test_the_plot_is_current():
    drawn = (figures.IMAGES / "region.svg").read_text()
    assert f"rows {figures.digest(figures.REGION)}" in drawn, "run python benchmarks/figures.py"


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


def test_a_decode_peer_of_one_type_has_no_column_for_the_other():
    shape = {"batch": "1", "context": "1024", "ragged": "0", "heads": "16", "queries": "1"}
    rows = [
        {**shape, "dtype": dtype, "candidate": candidate, "p50_us": us}
        for dtype, candidate, us in (
            ("bf16", "ours", "6"), ("bf16", "fa3", "12"),
            ("fp8", "ours", "5"), ("fp8", "flashmla", "4"),
        )
    ]  # fmt: skip
    assert figures.attention_means(rows) == [
        "| heads | bf16, FlashAttention 3 | fp8, FlashMLA |",
        "|---|---|---|",
        "| 16 | 2.00x (2.00, 2.00); 0 of 1 | 0.80x (0.80, 0.80); 1 of 1 |",
    ]


def test_a_point_or_an_arm_that_was_not_run_is_said():
    row = {"model": "m", "vllm": "0.33.0", "cache": "auto", "context": "1024", "arm": "default"}
    first = {**row, "batch": "1", "gpu_us": "100", "gpu_change": "0"}
    rows = [
        first,
        {**first, "arm": "fused", "gpu_us": "90", "gpu_change": "-10"},
        {**first, "context": "16384", "batch": "8"},
    ]
    assert figures.complete_table(rows, arms=("cat", "fused"))[2:] == [
        "| m, 0.33.0, bf16, 1024 | 100 (-, -10.0) | not run |",
        "| m, 0.33.0, bf16, 16384 | not run | 100 (-, -) |",
    ]
