"""The documentation site builds strictly, and needs nothing from the network to be read."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fetched_from_the_network(site):
    """Addresses outside the site that its pages and style sheets load; links to click on do not."""
    found = []
    fetching = re.compile(r"<(?:script|img|iframe|source|video|link) [^>]+>")
    for page in site.rglob("*.html"):
        tags = [tag for tag in fetching.findall(page.read_text()) if 'rel="canonical"' not in tag]
        found += re.findall(r"""\b(?:src|href)=["']?([^"' >]+)""", "".join(tags))
    for sheet in site.rglob("*.css"):
        found += re.findall(r"(?:@import\s+|url\()['\"]?([^'\")\s]+)", sheet.read_text())
    return [address for address in found if re.match(r"(?:\w+:)?//", address)]


def test_the_site_builds_offline_and_whole(tmp_path):
    """`mkdocs build` as `make docs` calls it, in a copy of its sources."""
    for name in ("docs", "tools", "mla_fusion", "passes", "patterns"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict"], cwd=tmp_path,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = tmp_path / "build" / "site"
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert fetched_from_the_network(site) == []
    api = (site / "api.html").read_text()
    for name in ("kernels.fused_mla_decode_prep", "passes.pipeline.MLAFusionPass", "report.Report"):
        assert f'id="mla_fusion.{name}"' in api
    # The theme fetches a worker from a CDN unless it finds this one.
    assert "js/iframe-worker.js" in (site / "index.html").read_text()
