"""The list of spellings of "rotate q and k_pe, then write the cache", most common first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_fusion.patterns import inplace, native, nope
from mla_fusion.patterns.site import Decline

if TYPE_CHECKING:
    from mla_fusion.patterns.rope import RopeMatch
    from mla_fusion.patterns.site import Site

SPELLINGS = (native.match, inplace.match, nope.match)


def match(site: Site) -> RopeMatch:
    """The first spelling that fits.

    Raises:
        Decline: none fits.
    """
    for spelling in SPELLINGS:
        found = spelling(site)
        if found is not None:
            return found
    raise Decline("unknown-rope", f"q comes from {site.q.format_node()}")
