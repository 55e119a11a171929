"""The command line without an engine: arguments, errors for the reader, stored reports."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from mla_fusion import cli, files, report
from mla_fusion.cli import child
from mla_fusion.cli.demo import command as demo
from mla_fusion.cli.demo import tiny_models
from mla_fusion.config import identity, vllm_compat
from mla_fusion.report.graphs import LayerGraph, Node
from mla_fusion.report.reasons import Decline


def fail(capsys, *argv):
    """Run a command that must fail as a user error; its one line."""
    assert cli.main([str(a) for a in argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "Traceback" not in text
    return text


# --- arguments


def test_demo_exit_status_says_whether_the_tokens_are_equal(monkeypatch, tmp_path):
    for result, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(demo, "compare", lambda out, result=result: result)
        assert cli.main(["demo", "--out", str(tmp_path)]) == status


# --- the engine's errors


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("Traceback:\nValueError: a\n[rank0]: RuntimeError: b\nbye", "RuntimeError: b"),
        ("ValidationError: 1 error\n  Value error, d\nfor more", "Value error, d"),
        ("(EngineCore pid=1) ERROR 01-01 vllm.NotAnError: c", "vllm.NotAnError: c"),
        ("Killed", "Killed"),
        ("ValueError: " + "a" * 9000, "ValueError: " + "a" * 75 + "..."),
        ("", "it ended before it wrote anything"),
    ],
)
def test_the_error_of_a_log(log, message, tmp_path):
    (tmp_path / "engine.log").write_text(log)
    assert child.last_error(tmp_path / "engine.log") == message


def test_jobs_share_facts_of_model_classes_and_measurements_and_no_graph(tmp_path, monkeypatch):
    first, second, users = (tmp_path / name for name in ("first", "second", "users"))
    child.share_facts(first, users)
    (first / "modelinfos" / "V3.json").touch()
    (first / "torch_compile_cache").mkdir()
    for _ in range(2):
        child.share_facts(second, users)
    assert {path.name for path in second.iterdir()} == {"mla_fusion", "modelinfos"}
    assert (second / "modelinfos" / "V3.json").exists()
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: second)
    assert identity.tables_folder().resolve() == users / "mla_fusion" / "tables"


# --- report


def store(root, name, fused):
    folder = root / "torch_compile_cache" / "mla_fusion"
    folder.mkdir(parents=True, exist_ok=True)
    declined = {} if fused else {Decline("shape", "q [7]"): 2}
    stored = report.Report(
        "reference", 8, [report.RangeReport((1, 8), layers=2, fused=fused, declined=declined)]
    )
    report.store(folder / name, stored)
    return folder / name


def test_report_prints_the_newest_first(tmp_path, capsys):
    old, new = store(tmp_path, "a.json", fused=2), store(tmp_path, "b.json", fused=0)
    os.utime(old, (1, 1))
    assert cli.main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.index(str(new)) < text.index("[shape]") < text.index(str(old))
    assert "2 MLA layers, 2 fused" in text.split(str(old))[1]
    assert cli.main(["report", str(old)]) == 0
    assert str(new) not in capsys.readouterr().out


def test_report_without_any(tmp_path, capsys, monkeypatch):
    assert "start vLLM once" in fail(capsys, "report", tmp_path)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "of a fresh machine"))
    assert "start vLLM once" in fail(capsys, "report")
    assert "does not exist" in fail(capsys, "report", tmp_path / "absent.json")


DAMAGED = {
    "empty": lambda text: "",
    "none": lambda text: "{}",
    "list": lambda text: "[]",
    "field": lambda text: '{"provider": 1}',
    "digits": lambda text: text.replace('"bucket":8', '"bucket":' + "9" * 5000),
    "depth": lambda text: "[" * 100_000,
    "deep field": lambda text: text.replace('"bucket":8', '"bucket":' + "[" * 9000 + "]" * 9000),
    "type": lambda text: text.replace('"layers":2', '"layers":"2"'),
    "negative": lambda text: text.replace('"fused":0', '"fused":-1'),
    "reason": lambda text: text.replace('"shape"', '"no such reason"'),
    "empty range": lambda text: text.replace("[1,8]", "[]"),
    "reversed range": lambda text: text.replace("[1,8]", "[8,1]"),
    "not finite": lambda text: text.replace('"pass_ms":0.0', '"pass_ms":NaN'),
    "unknown field": lambda text: text.replace('"bucket"', '"x":1,"bucket"'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_report_is_one_line_and_does_not_end_a_start(damage, tmp_path, capsys, caplog):
    path = store(tmp_path, "a.json", fused=0)
    whole, text = report.load(path), path.read_text()
    path.write_text(DAMAGED[damage](text))
    assert path.read_text() != text
    said = fail(capsys, "report", path)
    assert f"{path} is not a stored report" in said and len(said) < 500
    assert report.find(path) is None
    [record] = [r for r in caplog.records if str(path) in r.getMessage()]
    assert record.levelname == "WARNING"
    report.store(path, whole)
    assert report.find(path) == whole


def unreadable(kind, path):
    """A path from which one could read for ever, or for very long."""
    if kind == "device":
        return Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
            bound.bind(path.name)
    else:
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", ["check", "report"])
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "10 GiB"])
def test_what_is_read_is_a_file_of_a_bounded_size(kind, command, tmp_path, capsys):
    path = unreadable(kind, tmp_path / "a")
    said = fail(capsys, command, path)
    assert str(path) in said
    size = "10,737,418,240 bytes, more than 32 MiB"
    assert (size if kind == "10 GiB" else "a device, a pipe or a socket") in said


@pytest.mark.timeout(20)
def test_the_bound_holds_for_a_file_that_changes_after_it_was_opened(tmp_path, monkeypatch):
    path, opened = tmp_path / "a", os.open

    def swap(name, flags):
        """What a check before the opening has seen is no longer there."""
        path.unlink()
        os.mkfifo(path)
        return opened(name, flags)

    path.write_text("a")
    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError, match="pipe"):
        files.read_bounded(path)
    with pytest.raises(OSError, match="more than 32 MiB"):  # its size is 0
        monkeypatch.undo()
        monkeypatch.setattr(os, "fstat", lambda _: os.stat(__file__))
        files.read_bounded(Path("/dev/zero"))


@pytest.mark.parametrize(
    "odd", ["\x1b[2J", "\x07", "\x9b31m", "\u202e", "\u2066", "\x7f", "\r", "\udc9b"]
)
def test_no_terminal_obeys_a_stored_report(odd, tmp_path, capsys, caplog):
    """In every text of it, in its graph, and in names of files."""
    bad = f"a{odd}b"
    layer = LayerGraph([Node("x", bad, [bad], bad)], [Node(bad, "mla_fusion::f", [bad], bad)])
    ranges = [report.RangeReport((1, 8), 2, 1, {Decline("shape", bad): 1}, layer)]
    made = report.Report(bad, 8, ranges, bad, {bad: bad}, differing=[bad], epilogue=bad)
    path = tmp_path / f"report{odd}.json"
    report.store(path, made)
    (tmp_path / "report.json").write_bytes(path.read_bytes())
    for stage in ("before", "after"):
        (tmp_path / f"tokens_{odd}.{stage}.py").write_text(bad, errors="surrogatepass")
    drawn = [tmp_path / "x.svg", tmp_path / "x.html"]
    options = ["--graph", "--python", "--svg", str(drawn[0]), "--html", str(drawn[1])]
    for argv in ([path], [tmp_path], [tmp_path, *options], [path, "--python"], [f"{path}{odd}"]):
        cli.main(["report", *map(str, argv)])
    report.publish(report.find(path), "V3", cached=True)
    said = "".join([*capsys.readouterr(), *(r.getMessage() for r in caplog.records)])
    said += "".join(each.read_text() for each in drawn)
    assert "[shape]" in said and odd not in said and said.replace("\n", "").isprintable()
    assert said.count(ascii(odd)[1:-1]) > 12


def test_a_link_that_leads_nowhere_is_no_report(tmp_path, capsys):
    path = store(tmp_path, "a.json", fused=2)
    for name in ("b.json", "loop.json"):
        path.with_name(name).symlink_to("nowhere" if name == "b.json" else name)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert str(path) in capsys.readouterr().out
    path.unlink()
    assert "start vLLM once" in fail(capsys, "report", tmp_path)


# --- demo


def test_the_first_difference_is_found():
    assert demo.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert demo.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == (1, 1)


def test_a_demo_model_is_the_same_each_time():
    model = tiny_models.MODELS["deepseek-v2-shaped"]
    once, again = (tiny_models.weights(model, seed=0) for _ in range(2))
    assert all(again[name].equal(tensor) for name, tensor in once.items())
