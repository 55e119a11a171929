"""README's and docs/performance.md's tables and the plot are those of the rows in
benchmarks/results/."""

import figures
import pytest
import stale_rows


def test_tables_are_current():
    for page, content in figures.written().items():
        assert content == page.read_text(), "run python benchmarks/figures.py --tables"


def test_the_plot_is_current():
    assert f"rows {figures.digest()}" in figures.PLOT.read_text(), "run benchmarks/figures.py"


def test_rows_are_old_if_code_has_changed_that_runs():
    kernel = "MOST = 4\n\ndef f(x):\n    return x\n"
    told = '"""Doc."""\nMOST = 4  # tiles\ndef f(x: int):\n    """Doc."""\n    return x\n'
    assert stale_rows.code(kernel) == stale_rows.code(told)
    for old, new in (("4", "8"), ("return x", "return -x")):
        assert stale_rows.code(kernel.replace(old, new)) != stale_rows.code(kernel)


@pytest.mark.parametrize("flag, seen", [((1, 2), True), ((1, 3), False), ((5, 6), True)])
def test_a_difference_of_a_server_is_seen_if_no_ranges_overlap(flag, seen):
    columns = "median_tpot_ms", "median_ttft_ms", "output_throughput"
    rounds = {"default": (3, 4), "auto": flag}
    rows = [
        {"rate": "8.0", "arm": arm, **dict.fromkeys(columns, time)}
        for arm, times in rounds.items()
        for time in times
    ]
    [*_, line] = figures.serve_table(rows)
    assert line.startswith(f"| 8 | 3.5 (3-4); {sum(flag) / 2:.4g} ({flag[0]}-{flag[1]})")
    assert line.count("no difference seen") == (0 if seen else 3)
