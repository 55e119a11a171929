"""README's and docs/performance.md's tables and the plot are those of the rows in
benchmarks/results/."""

import figures
import pytest
import stale_rows

from mla_fusion import projections


def test_tables_are_current():
    for page, content in figures.written().items():
        assert content == page.read_text(), "run python benchmarks/figures.py --tables"


def test_the_plot_is_current():
    assert f"rows {figures.digest()}" in figures.PLOT.read_text(), "run benchmarks/figures.py"


KERNEL = "mla_fusion/kernel.py"
FILES = {
    KERNEL: "from mla_fusion import common\nfrom mla_fusion.common import helper\nMOST = 4\n"
    "@gluon.jit\ndef kernel(x):\n    return helper(x) + common.other(MOST)\n"
    "@gluon.jit\ndef norm(x):\n    return x * MOST\n",
    "mla_fusion/common.py": "def helper(x):\n    return x\ndef other(x):\n    return inner(x)\n"
    "def inner(x):\n    return x + 1\ndef apart(x):\n    return x + 2\n",
}  # fmt: skip


@pytest.mark.parametrize(
    "old, new, files",
    [("MOST = 4", "MOST = 8", {"kernel.py"}), ("x + 1", "x + 3", {"common.py"}),
     ("return x\n", "return -x\n", {"common.py"}), ("x + 2", "x + 3", set()),
     ("MOST = 4", "MOST = 4  # tiles", set()),
     ("def inner(x):", 'def inner(x: int):\n    """Doc."""', set())],
)  # fmt: skip
def test_rows_are_old_if_code_has_changed_that_their_kernel_runs(monkeypatch, old, new, files):
    def source(commit, path):
        return FILES.get(path, "").replace(*(("", "") if commit else (old, new)))

    monkeypatch.setattr(stale_rows, "source", source)
    stale_rows.definitions.cache_clear(), stale_rows.changed.cache_clear()
    assert stale_rows.changed("then", KERNEL) == files
    assert stale_rows.changed("then", f"{KERNEL}:norm") == files - {"common.py"}
    stale_rows.definitions.cache_clear()


@pytest.mark.parametrize(
    "name, row, timed",
    [("step_h200.csv", {"candidate": "fa3"}, 0), ("complete.csv", {"arm": "default"}, 0),
     ("complete.csv", {"arm": "auto", "batch": "0"}, 0), ("start.csv", {}, 0),
     ("step.csv", {"dtype": "bf16", "heads": "16", "queries": "2"}, 3),
     ("complete.csv", {"arm": "auto", "model": "r1-dp", "cache": "fp8"}, 6),
     ("complete.csv", {"arm": "auto", "batch": "8", "drafts": "3"}, 6),
     ("serve.csv", {"arm": "auto"}, 6), ("region.csv", {"candidate": "plain+triton"}, 1)],
)  # fmt: skip
def test_a_row_times_the_kernels_that_it_launched(name, row, timed):
    files = stale_rows.kernels(name, row)
    assert len(files) == timed and all(stale_rows.reached(stale_rows.NOW, file) for file in files)
    few = int(row.get("batch", 1)) * (1 + int(row.get("drafts", 0))) <= projections.MAX_TOKENS
    assert len(files) < 6 or files[-1].endswith(".py" if few else ":rms_norm")


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
    assert line.count("*") == (0 if seen else 3)


@pytest.mark.parametrize("most, star", [("9.9", ""), ("10", "*")])
def test_a_row_of_several_gpus_names_the_way_and_the_time_of_each_rank(most, star):
    changes = {"gpu_change": "-9.04", "gpu1_change": "2", "gpu2_change": "", "wall_change": "-1"}
    row = {"arm": "auto", "model": "r1-ep", "layers": "5", "gpus": "2", "batch": "8", **changes}
    row |= {"dp": "2", "drafts": "1", "vllm": "0.33.0", "all_reduce": "NCCL", "commit": "abc"}
    row |= {"wall_min": "8", "wall_max": most}
    default = row | {"arm": "default", "batch": "1", "wall_min": "10", "wall_max": "11"}
    [head, _, line] = figures.ranks_table([default, row, default])
    assert head.endswith("commit | batch 8 |")
    assert line.endswith(f"5 layers, DP2, 1 draft, 0.33.0, NCCL, abc | -9.0/+2.0; -1.0{star} |")
