"""The views of a stored report: text, drawing and page."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_fusion import cli, report
from mla_fusion.ops import Product
from mla_fusion.report import views
from mla_fusion.report.graphs import LayerGraph, Node, PassOps
from mla_fusion.report.reasons import Decline
from mla_fusion.report.views import FUSED, KEPT, NEW, REMOVED

OWN = "mla_fusion::fused_aiter_qk_rope_kvcache_q_concat_quant_mla"
RESULTS = "bf16[T, 128, 192], bf16[T, 1, 64], fp8[T, 128, 576]"  # longer than a panel is wide
LAYER = LayerGraph(
    before=[
        Node("mm", "aten::mm", ["x"], ", ".join(["bf16[T, 128, 192]"] * 3)),
        Node("other", "aten::relu", ["x"], "bf16[T, 8]"),
        Node("neg", "aten::slice", ["mm"], "bf16[T, 192]", "[:, 128:]"),
        Node("auto_functionalized", "vllm::attention", ["neg"], "bf16[T, 512]"),
    ],
    after=[
        Node("mm", "aten::mm", ["x"], ", ".join(["bf16[T, 128, 192]"] * 3)),
        Node("other", "aten::relu", ["x"], "bf16[T, 8]"),
        Node("empty", "aten::empty", [], "fp8[T, 576]"),
        Node("auto_functionalized_1", OWN, ["mm", "empty"], RESULTS),
        Node("view", "aten::view", ["auto_functionalized_1.1"], "fp8[T, 576]"),
    ],
)
DECLINED = {Decline("shape", "q <b> & more"): 1}


def stored(layer=LAYER):
    fused = 2 if layer else 0
    ranges = [
        report.RangeReport((1, 8), layers=3, fused=fused, declined=DECLINED, layer=layer),
        report.RangeReport((9, 2048), layers=3),
    ]
    return report.Report("triton", 8, ranges, "Model<V3>", {"vLLM": "0.32.0", "device": "cpu"})


@pytest.fixture
def path(tmp_path):
    report.store(tmp_path / "report.json", stored())
    return tmp_path / "report.json"


def test_another_version_of_the_format_is_refused_by_name(path, capsys):
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    with pytest.raises(ValueError, match="another release"):
        report.load(path)
    assert cli.main(["report", str(path)]) == 2
    assert "another release" in capsys.readouterr().err


def test_marks_tell_replaced_new_kept_and_own_ops():
    before, after = views.rows(LAYER).values()
    assert [row.mark for row in before] == [KEPT, KEPT, REMOVED, REMOVED]
    assert [row.mark for row in after] == [KEPT, KEPT, NEW, FUSED, NEW]


def test_text_marks_the_fused_op_and_leaves_out_what_is_far_from_a_change():
    lines = views.text(LAYER)
    assert lines[0].startswith("one layer, 4 ops before, 5 after")
    name = OWN.removeprefix("mla_fusion::")
    assert f"  * out_1 = {name}(mm, empty) -> {RESULTS}" in lines
    assert "  + view = view(out_1.1) -> fp8[T, 576]" in lines
    assert "  - neg = slice[:, 128:](mm) -> bf16[T, 192]" in lines
    assert any(line.startswith("    mm = mm(x) -> bf16[T, 128, 192], ") for line in lines)
    assert not any("relu" in line for line in lines)
    assert lines.count("      ... 1 kept") == 2


def test_the_drawing_has_a_row_for_each_op_and_an_arc_for_each_input():
    tree = ET.fromstring(views.drawing(LAYER))
    space = {"s": "http://www.w3.org/2000/svg"}
    classes = [g.get("class") for g in tree.iterfind(".//s:g[@class]", space)]
    assert classes == ["kept", "kept", "gone", "gone", "kept", "kept", "new", "fused", "new"]
    assert len(tree.findall(".//s:path", space)) == 2 + 3
    assert "fp8[T, 128, 576]" in [each.text for each in tree.iterfind(".//s:text", space)]
    # Nothing is drawn outside its panel: a phone shows one panel's width.
    for shown in tree.iterfind(".//s:g[@class]/s:text", space):
        characters = len("".join(shown.itertext()))
        assert float(shown.get("x", "")) + characters * 6.15 <= views.PANEL_WIDTH


@given(st.text(st.one_of(st.characters(), st.characters(categories=["Cc", "Cs", "Cn"]))))
def test_a_drawing_and_a_page_are_xml_whatever_a_graph_holds(odd):
    layer = LayerGraph([Node(odd, odd, [odd], odd)], [Node("f", OWN, [], odd)])
    made = dataclasses.replace(stored(layer), model=odd, provider=odd, versions={odd: odd})
    for content in (views.drawing(layer), views.page(made)):
        content.encode()
        parsed(content)


def parsed(content):
    """A page as XML, which fails where tags do not match, and its text."""
    closed = re.sub(r"<(meta|link)([^>]*)>", r"<\1\2/>", content.removeprefix("<!DOCTYPE html>"))
    tree = ET.fromstring(closed)
    return tree, "".join(tree.itertext())


def test_the_page_needs_nothing_else():
    content = views.page(stored())
    tree, _ = parsed(content)
    assert not {"script", "img", "iframe", "object"} & {each.tag for each in tree.iter()}
    links = [each.get(name) for each in tree.iter() for name in ("src", "href", "action")]
    assert list(filter(None, links)) == ["data:,"]
    assert "@import" not in content and "url(" not in content
    # The one address in it is the name of a format, which nothing fetches.
    assert set(re.findall(r"https?://[^\s\"'<]+", content)) == {"http://www.w3.org/2000/svg"}
    assert tree.find(".//meta[@name='viewport']") is not None
    assert "prefers-color-scheme: dark" in content


def test_the_page_says_what_the_report_says():
    tree, said = parsed(views.page(stored()))
    assert "2 of 3 MLA layers of the decode graphs fused" in said
    assert "Model<V3>" in said and "q <b> & more" in said and said.count("untouched") == 2
    assert [len(tree.findall(f".//{tag}")) for tag in ("{*}svg", "table")] == [2, 4]
    # Products of few tokens, ours and others with their reason, have a part of their own.
    made = stored()
    made.ranges[0].products = {Product(2048, (3072, 576)): 27}
    made.ranges[0].plain_products = {Decline("product-slower", "2048 -> 64"): 26}
    tree, said = parsed(views.page(made))
    assert "2048 -> 3072 + 576" in said and "[product-slower]" in said
    assert len(tree.findall(".//table")) == 6
    # So has each pass: its ops before and after, and how many calls of each came or went.
    made.ranges[0].passes = {"4": PassOps({"aten::mm": 3, "aten::mul": 2}, {"aten::mm": 3, OWN: 1})}
    made.chosen = "0-30"
    tree, said = parsed(views.page(made))
    assert "0-30" in said and ", layers 0-30, " in made.lines()[0]
    row = next(r for r in tree.iter("tr") if r[0].text == "4")
    assert [cell.text for cell in row[1:]] == ["5", "4", "2 fewer mul, 1 more " + OWN[12:]]
    # Where nothing fused there are the reasons and no graph.
    tree, said = parsed(views.page(stored(None)))
    assert "0 of 3 MLA layers" in said and "[shape]" in said
    assert tree.find(".//{*}svg") is None


def test_the_command_writes_them(path, capsys):
    drawing, document = path.with_suffix(".svg"), path.with_suffix(".html")
    argv = ["report", str(path.parent), "--graph", "--svg", str(drawing), "--html", str(document)]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines() == views.text(LAYER)
    assert drawing.read_text() == views.drawing(LAYER)
    assert document.read_text() == views.page(stored())


def test_without_a_fused_layer_there_is_no_graph_to_show(tmp_path, capsys):
    report.store(tmp_path / "report.json", stored(None))
    assert cli.main(["report", str(tmp_path), "--graph"]) == 2
    assert "no layer fused" in capsys.readouterr().err


def test_python_of_a_dump(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path), "--python"]) == 2
    assert "--dump DIR" in capsys.readouterr().err
    names = ["7.mla_fusion.before.0.py", "7.mla_fusion.after.1.py"]
    for name in names:
        (tmp_path / f"__compiled_fn_{name}").write_text(f"# {name}\n")
    assert cli.main(["report", str(tmp_path), "--python"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(names[0]) < shown.index(names[1])
    report.store(tmp_path / "report.json", stored())
    document = tmp_path / "x.html"
    assert cli.main(["report", str(tmp_path), "--python", "--html", str(document)]) == 0
    assert names[0] in capsys.readouterr().out and document.exists()
