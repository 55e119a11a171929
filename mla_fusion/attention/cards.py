"""Every decode kernel of the Triton provider, by its card."""

from mla_fusion.attention.card import FEW, OVERHEAD, PLANNED_TOKENS, Card, Decodes, Shape
from mla_fusion.attention.cdna import cards as cdna
from mla_fusion.attention.hopper import cards as hopper
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.gpu import Gpu

WIDEST_IN_FULL = 576  # a wider cache entry leaves registers for 16 query rows


def _portable(here: Gpu, of: Decodes) -> dict[str, int]:
    """As many CTAs as registers hold, where the row blocks of an item run at once: two an SM of
    NVIDIA with 16 query rows and four warps of up to 255 registers, else one. Compiled for every
    GPU, not measured. A sparse plan has the default, one an SM."""
    plan = {"kv_granularity": PLANNED_TOKENS, "overhead": OVERHEAD}
    if of.scopes:
        return plan
    tile = 16 if of.rows <= 16 or of.width > WIDEST_IN_FULL else 32
    few = here.vendor == "NVIDIA" and of.rows <= 16 and of.width <= WIDEST_IN_FULL
    return {"ctas": max(1, (2 if few else 1) * here.sms // -(-of.rows // tile)), **plan}


PORTABLE = Card(
    "triton.decode_kernel", (), lambda given: "", _portable,
    (*FEW, Shape(40, 1, 64, 256, 32, gap=3), Shape(16, 1, 64, 320, 64)),
    (Shape(64, 2, 32), Shape(128, 8, 128), Shape(16, 1, 64, 1024, 128)),
    widens=True,
)  # fmt: skip
# In order: of those that take a decode the first is launched, and the last takes every one.
CARDS: tuple[Card, ...] = (*hopper.CARDS, *cdna.CARDS, PORTABLE)


def of(here: Gpu) -> list[Card]:
    """The cards of a GPU."""
    return [card for card in CARDS if not card.why_not_on(here)]


def named(name: str) -> Card:
    """The card of this name; StopIteration without one."""
    return next(card for card in CARDS if card.name == name)


def chosen(here: Gpu, given: Inputs) -> Card:
    """The card of the kernel that is launched on a GPU, by what a captured graph keeps: shapes,
    strides, types, the scale of the scores, and whether addresses are multiples of 16 bytes."""
    return next(card for card in CARDS if card.takes(here, given))


def settings(here: Gpu, decodes: Decodes) -> dict[str, int]:
    """Arguments of `allocate` on a GPU, for the first kernel that takes such decodes."""
    found = (card.settings(here, decodes) for card in of(here))
    return next(each for each in found if each is not None)
