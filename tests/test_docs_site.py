"""The documentation site builds strictly, and needs nothing from the network to be read."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("docs", "tools", "mla_fusion", "passes", "patterns")


def build(folder):
    """`mkdocs build` as `make docs` calls it; the finished process."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def checkout(tmp_path):
    """A copy of the site's sources, to plant errors in."""
    for name in SOURCES:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


class Fetched(HTMLParser):
    """The addresses that a browser fetches when it shows a page; links to click on are not."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.addresses.append(given.get("href") or "")


def fetched_from_the_network(site):
    """Addresses outside the site that its pages and style sheets load."""
    found = []
    for page in site.rglob("*.html"):
        found += Fetched(page.read_text()).addresses
    for sheet in site.rglob("*.css"):
        found += re.findall(r"(?:@import\s+|url\()['\"]?([^'\")\s]+)", sheet.read_text())
    return [address for address in found if re.match(r"(?:\w+:)?//", address)]


def test_the_site_builds_offline_and_whole(checkout):
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = checkout / "build" / "site"
    pages = {page.stem for page in (checkout / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert fetched_from_the_network(site) == []
    api = (site / "api.html").read_text()
    for name in ("kernels.fused_mla_decode_prep", "passes.pipeline.MLAFusionPass", "report.Report"):
        assert f'id="mla_fusion.{name}"' in api
    # The theme fetches a worker from a CDN unless it finds this one.
    assert "js/iframe-worker.js" in (site / "index.html").read_text()


UNLISTED = "# A page that the navigation does not list"
DEAD_LINKS = "[x](no-such-page.md) [y](flags.md#no-such-heading)"


@pytest.mark.parametrize(
    "planted, complaints",
    [
        (
            {"index.md": DEAD_LINKS, "new-page.md": UNLISTED},
            ("no-such-page.md", "no-such-heading", "new-page.md"),
        ),
        ({"api.md": "::: mla_fusion.no_such_module"}, ("no_such_module",)),
    ],
)
def test_planted_errors_fail_the_build(checkout, planted, complaints):
    for name, text in planted.items():
        with (checkout / "docs" / name).open("a") as page:
            page.write(f"\n{text}\n")
    done = build(checkout)
    assert done.returncode != 0
    assert all(complaint in done.stderr for complaint in complaints)


def test_a_planted_cdn_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<script src="https://unpkg.com/x"></script><a href="//y">')
    (tmp_path / "b.css").write_text('@import "//fonts.googleapis.com/css"; a{b:url(c.png)}')
    assert fetched_from_the_network(tmp_path) == [
        "https://unpkg.com/x",
        "//fonts.googleapis.com/css",
    ]
