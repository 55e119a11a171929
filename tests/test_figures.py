"""The tables and plots of docs/performance.md are those of the rows in benchmarks/results/."""

import figures


def test_tables_are_current():
    page = figures.PAGE.read_text()
    assert figures.written(page) == page, "run python benchmarks/figures.py --tables"


def test_the_plot_is_current():
    drawn = (figures.IMAGES / "region.svg").read_text()
    assert f"rows {figures.digest(figures.REGION)}" in drawn, "run python benchmarks/figures.py"
