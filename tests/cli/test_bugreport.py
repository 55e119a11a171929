"""`mla-fusion bugreport`: one file, without paths, addresses and the names of hosts and user."""

import getpass
import json
import os
import platform
import socket
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_fusion import cli, files, report
from mla_fusion.cli.doctor import command
from mla_fusion.cli.report import bugreport
from mla_fusion.cli.report.redact import redactor
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline

SECRETS = ("node17", "acme", "jdoe", "Jane", "Doe", "secret", "models", "10.20.30.40", "gpu-b")
FOUND = command.probe


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written() -> (the text of the file, its data), on a machine with a known name and folders."""
    home = tmp_path / "Jane Doe"
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.acme.example")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MODELS", "/srv/secret models")
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: home)
    broken = (
        f"in {home}/.cache/a b.py, line 3: '/srv/secret models/x.bin', ~jdoe/secret/y, ../secret/z "
        "at node17:8000, user jdoe, tcp://gpu-b:29500/q, 10.20.30.40; "
        "vllm-project/vllm#45798, 448/584"
    )
    monkeypatch.setattr(command, "probe", lambda: FOUND() | {"plugin": broken})
    decline = Decline("shape", "/mnt/checkpoints/secret.safetensors on NODE node17.acme.example")
    ranges = [report.RangeReport((1, 8), layers=2, fused=1, declined={decline: 1})]
    report.store(report.folder(home) / "a.json", report.Report("triton", 8, ranges))
    (report.folder(home) / "b.json").write_text("{")
    os.utime(report.folder(home) / "b.json", (1, 1))  # the older one
    (report.folder(home) / "c.json").symlink_to("nowhere")
    (report.folder(home) / "d.json").write_bytes(bytes(2**20 + 1))
    os.utime(report.folder(home) / "d.json", (0, 0))

    def write():
        assert cli.main(["bugreport", str(tmp_path / "out.json")]) == 0
        text = (tmp_path / "out.json").read_text()
        return text, json.loads(text)

    return write


def test_no_path_and_no_name_is_left(written):
    text, data = written()
    assert not [secret for secret in SECRETS if secret in text]
    assert "vllm-project/vllm#45798, 448/584" in data["doctor"]["plugin"]
    first, second, third = data["reports"]
    assert first["ranges"][0]["fused"] == 1 and "[shape]" not in text and '"shape"' in text
    assert second.startswith("cannot be read: ") and "1,048,577 bytes, more than 1 MiB" in third
    assert "torch sees none here" in data["selftest"]
    assert {"works", "torch", "problems", "issues"} <= data["doctor"].keys()


@pytest.mark.parametrize("user", ["plugin", "ranges", "shape"])
def test_a_user_who_is_called_like_a_key_loses_none(user, written, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    _, data = written()
    assert {"works", "plugin", "problems", "issues"} <= data["doctor"].keys()
    [of_range] = data["reports"][0]["ranges"]
    assert of_range["declined"]["shape"].keys() == {"layers", "detail"}
    assert vllm_compat.versions().keys() <= bugreport.KEYS


PART = st.text(string.ascii_letters + "äß漢_-.,()[]&+ ", min_size=1, max_size=12)
FOLDER = st.builds("Zq{}qZ".format, PART | st.just("O'Brien"))  # found again in what is left
PATH = st.builds(
    lambda root, folders: root + "/".join(folders),
    st.sampled_from(
        ["/", "/srv/", "~/", "~Zq/", "./", "../", "Zq a/", "file:///", "C:\\", "\\\\", "%2F"]
    ),
    st.lists(FOLDER, min_size=1, max_size=4),
)
NAME = st.from_regex(r"Zq[a-z]{0,6}[0-9]{1,3}|Zq[a-z]{1,6}-[0-9]{1,3}(-[a-z]{2})?", fullmatch=True)
HOST = st.one_of(
    NAME,
    st.builds(
        "{}:{}".format, st.from_regex(r"Zq[a-z-]{0,6}[a-z]", fullmatch=True), st.integers(1, 65535)
    ),
    st.builds("{}.{}.example".format, NAME, st.just("Zq")),
    st.builds("{}://{}:8000/v1".format, st.sampled_from(["tcp", "http"]), NAME),
    st.builds("Zq@{}".format, NAME),
)
ADDRESS = st.one_of(
    st.ip_addresses().map(str),
    st.ip_addresses(v=4).map("{}:8000".format),
    st.ip_addresses(v=6).map("[{}]:8000".format),
    st.ip_addresses(v=6).map("{}%eth0".format),
)  # fmt: skip
SENTENCE = st.sampled_from([
    "{}", "cannot open {}", "[Errno 2] no such file: '{}'", 'at "{}", line 3', "--dir={}", "({})",
    "{}: undefined symbol", "no\n{}\nhere", "it's `{}`",
])  # fmt: skip


@given(SENTENCE, st.one_of(PATH, HOST))
def test_no_text_keeps_a_path_or_a_host(sentence, secret):
    left = redactor()(sentence.format(secret))
    assert "Zq" not in left and "qZ" not in left


@given(SENTENCE, ADDRESS)
def test_no_text_keeps_an_address(sentence, address):
    left = redactor()(sentence.format(address))
    assert address not in left and address.strip("[]").partition("%")[0] not in left
    assert "<host>" in left


@pytest.mark.parametrize("text", [
    "NVIDIA A100-SXM4-80GB, AMD Instinct MI300X, NVIDIA GeForce RTX 4090, NVIDIA H100 80GB HBM3",
    "2.9.0+cu128, 0.1.19.post1, 2.12.0.dev20260101+rocm7.0, sm_90, gfx942, x86_64, cuda:0",
    "aten::mm, vllm::attention -> bf16[T, 16, 192], fp8[T, 576]; auto_functionalized_1, mm_12",
    "module 'torch.ops' has no attribute 'x': libcudart.so.12: undefined symbol",
    "DeepseekV3ForCausalLM, KimiK3, float8_e4m3fn, model.layers.0.self_attn, 448/584",
    *sorted(bugreport.KEYS),
])  # fmt: skip
def test_what_a_diagnosis_needs_is_kept(text):
    assert redactor()(text) == text


@given(st.dictionaries(st.sampled_from(["/a", "/b", "/c", "<path>", "layers"]), st.integers()))
def test_keys_that_become_equal_lose_no_entry(entries):
    left = files.each_text(entries, redactor(), redactor())
    assert [*left.values()] == [*entries.values()]


def test_the_rows_of_selftest_where_there_is_a_gpu(written, monkeypatch):
    examine = lambda thorough: {"rows": ["a kernel"]}  # noqa: E731
    monkeypatch.setattr("mla_fusion.cli.selftest.command.examine", examine)
    assert written()[1]["selftest"] == {"rows": ["a kernel"]}


@pytest.mark.parametrize("name", ["nodir/x.json", "folder", "name" * 99, "loop"])
def test_a_place_that_cannot_be_written_is_refused_first(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bugreport, "_doctor", pytest.fail)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["bugreport", str(tmp_path / name)]) == 2
    assert f"cannot write {tmp_path / name}: " in capsys.readouterr().err
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_was_there_outlives_every_error(fault, written, tmp_path, monkeypatch):
    """As if the disk were full, or the user had enough, at each step."""
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to("old.json")
    there = {*tmp_path.iterdir()}

    def fail(*_, **__):
        raise fault

    for of, step in (bugreport, "_selftest"), (type(old), "write_text"), (type(old), "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(of, step, fail)
            if of is bugreport and isinstance(fault, OSError):
                with pytest.raises(OSError, match="No space"):
                    cli.main(["bugreport", str(link)])
            else:
                assert cli.main(["bugreport", str(link)]) in (2, 130)
        assert old.read_text() == "old" and {*tmp_path.iterdir()} == there
    assert cli.main(["bugreport", str(link)]) == 0
    assert "doctor" in json.loads(old.read_text()) and link.is_symlink()
    assert old.stat().st_mode & 0o777 == 0o640 and {*tmp_path.iterdir()} == there
