"""The measured files that ship, and with how many sequences their rows say that ours is faster."""

import json

import figures
import pytest

from mla_fusion.cli.calibrate import tables as convert
from mla_fusion.measure import records
from mla_fusion.runtime import measured


@pytest.mark.parametrize(
    ("folder", "shipped"),
    [(measured.FOLDER, figures.shipped()), (figures.SPARSE_FOLDER, figures.sparse_shipped())],
)
def test_the_shipped_files_are_what_the_rows_say(folder, shipped):
    """Or, of a GPU whose rows are kept nowhere else, as the tool writes them."""
    for path in folder.iterdir():
        written, held = path.read_text(), json.loads(path.read_bytes())
        assert written == shipped.get(path.name, records.text(held))
        assert measured.read(path, held["gpu"]) and path.name == measured.file_name(held["gpu"])


@pytest.mark.parametrize(
    "change",
    [{"error": "0.0041"}, {"error": "nan"}, {"latent": "256"}, {"page": "16"}, {"values": "0"}],
)
def test_rows_of_a_wrong_kernel_or_another_shape_do_not_ship(tmp_path, change):
    row = figures.read(figures.STEPS)[0]
    assert row["candidate"] == "ours"
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(",".join(each) for each in (row, (row | change).values())))
    with pytest.raises(ValueError, match="not a row"):
        figures.shipped(path)


def test_rows_of_all_widths_of_w_uv_decide_against_each_peer(tmp_path):
    row = dict.fromkeys(convert.FACTS, "") | dict.fromkeys(convert.TIMES, "1.0")
    row |= {"gpu": "G", "dtype": "fp8", "heads": "8", "queries": "1", "batch": "1"}
    rows = [
        {**row, "context": "70", "ragged": "0", "values": values, "candidate": name}
        | ({"p50_us": ours} if name == "ours" else {})
        for values, ours in (("256", "0.7"), ("128", "0.5"))
        for name in ("ours", "flashmla", "triton_mla")
    ]
    (tmp_path / "G.json").write_text(records.text(convert.tables(rows)["G.json"]))
    found = measured.read(tmp_path / "G.json", "G")
    assert {shape: [row[4] for row in rows] for shape, rows in found.items()} == {
        ("float8_e4m3fn", 8, 1, backend): [0.5, 0.7] for backend in ("FLASHMLA", "TRITON_MLA")
    }


@pytest.mark.parametrize(
    ("ours", "max_model_len", "runs"),
    [  # times of ours by context, for each number of sequences; the backend takes 1.0
        ({1: (1.0, 1.0), 4: (1.0, 1.0), 16: (0.9, 0.9)}, 8192, [(1, 16)]),
        ({1: (1.1, 1.1), 4: (0.9, 0.9), 16: (1.0, 1.0), 64: (1.1, 1.1)}, 8192, [(4, 16)]),
        ({1: (0.9, 0.9), 2: (1.1, 1.1), 4: (0.9, 0.9), 8: (0.9, 0.9)}, 8192, [(1, 1), (4, 8)]),
        ({1: (1.1, 1.1)}, 8192, []),
        ({1: (0.8, 1.07)}, 8192, [(1, 1)]),  # loses 7 % in one, gains in the mean
        ({1: (0.8, 1.09)}, 8192, []),  # loses more than 7 % in one
        ({1: (1.01, 1.0)}, 8192, []),  # loses in the mean
        ({1: (0.8, 1.09)}, 4096, []),  # nearer to 8192 than to 1024
        ({1: (0.8, 1.09)}, 4095, [(1, 1)]),
        ({1: (0.8, 1.09)}, 1, [(1, 1)]),  # shorter than any row
    ],
)
def test_the_contexts_that_an_engine_can_have_decide(ours, max_model_len, runs):
    rows = [
        measured.Row(sequences, context, 0, us, us, us, 1.0, 1.0, 1.0)
        for sequences, times in ours.items()
        for context, us in zip((1024, 8192), times, strict=True)
    ]
    assert measured.of_rows(rows, max_model_len) == tuple(runs)
    assert measured.of_rows(rows[::-1], max_model_len) == tuple(runs)


@pytest.mark.parametrize(
    ("max_model_len", "runs"), [(202752, ((1, 1024),)), (2048, ((1, 16), (64, 1024)))]
)
def test_32_sequences_of_64_heads_in_fp8_are_vllms_where_contexts_are_short(max_model_len, runs):
    assert measured.spans("NVIDIA H200", max_model_len)["float8_e4m3fn", 64, 1, "FLASHMLA"] == runs
