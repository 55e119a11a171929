"""`mla-fusion bench`, and the choice of candidates that its parts share."""

from collections.abc import Collection

from mla_fusion.cli import UserError


def pick(asked: Collection[str], offered: Collection[str]) -> list[str]:
    """The candidates that --peers names, all if it names none; a UserError if one is not here."""
    if unknown := " or ".join(name for name in asked if name not in offered):
        raise UserError(f"no candidate is called {unknown}: --peers takes {', '.join(offered)}")
    return [*(asked or offered)]
