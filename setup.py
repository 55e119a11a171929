"""A package page has no docs/ beside it: links into this repository are plain text there."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^]]+)\]\((?!https?:)[^)]+\)(\n?)")
text = Path("README.md").read_text(encoding="utf-8")
setup(
    long_description=LINK.sub(lambda link: "" if link[1] else link[2] + link[3], text),
    long_description_content_type="text/markdown",
)
