"""What several commands' tests share.

Golden files: `golden/COMMAND.txt` has what a command says in each case.

`pytest tests/cli -n 0 --renew-golden` writes them again; read the diff before you commit it.
"""

from pathlib import Path

import pytest

from tests.on_cpu import decodes_on_cpu

FOLDER = Path(__file__).with_name("golden")


@pytest.fixture
def golden(request):
    """golden(command, cases, case, text): compare the text with that of the case in the file,
    which has all `cases` in their order."""

    def check(command, cases, case, text):
        path = FOLDER / f"{command}.txt"
        parts = path.read_text().split("== ")[1:] if path.exists() else []
        kept = {name: said.rstrip("\n") for name, _, said in (p.partition("\n") for p in parts)}
        if request.config.getoption("renew_golden"):
            kept = {name: text if name == case else kept.get(name, "") for name in cases}
            path.write_text("\n\n".join(f"== {name}\n{said}" for name, said in kept.items()) + "\n")
        assert kept[case] == text
        assert list(kept) == list(cases)

    return check


@pytest.fixture
def on_cpu(monkeypatch):
    """The decodes run on a CPU."""
    with decodes_on_cpu(monkeypatch):
        yield
