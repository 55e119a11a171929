"""Every decode kernel of the Triton provider, by its card."""

from mla_fusion import gpu
from mla_fusion.attention.card import BLOCKS, FEW, Card, Decodes, Shape
from mla_fusion.attention.cdna import cards as cdna
from mla_fusion.attention.hopper import cards as hopper
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.report.reasons import Decline

WIDEST_IN_FULL = 576  # a wider cache entry leaves registers for 16 query rows


def portable_rows(rows: int, width: int) -> int:
    """Query rows of a CTA of the portable kernel for work items of `rows`, and entries of `width`
    values as the kernel pads them."""
    return 16 if rows <= 16 or width > WIDEST_IN_FULL else 32


def _portable(here: gpu.Gpu, of: Decodes) -> dict[str, int]:
    """As many CTAs as registers hold, where the row blocks of an item run at once: two an SM of
    NVIDIA with 16 query rows and four warps of up to 255 registers, else one. Compiled for every
    GPU, not measured. A sparse plan has the default, one an SM."""
    if of.scopes:
        return {**BLOCKS}
    few = here.vendor == "NVIDIA" and of.rows <= 16 and of.width <= WIDEST_IN_FULL
    blocks = -(-of.rows // portable_rows(of.rows, of.width))
    return {"ctas": max(1, (2 if few else 1) * here.sms // blocks), **BLOCKS}


PORTABLE = Card(
    "triton.decode_kernel", (), lambda given: None, lambda of: True, _portable,
    (*FEW, Shape(40, 1, 64, 256, 32, gap=3), Shape(16, 1, 64, 320, 64)),
    (Shape(64, 2, 32), Shape(128, 8, 128), Shape(16, 1, 64, 1024, 128)),
    widens=True,
)  # fmt: skip
# In order: of those that take a decode the first is launched, and the last takes every one.
CARDS: tuple[Card, ...] = (*hopper.CARDS, *cdna.CARDS, PORTABLE)
PRODUCTS: tuple[Card, ...] = hopper.PRODUCTS


def of(here: gpu.Gpu) -> list[Card]:
    """The cards of a GPU."""
    return [card for card in CARDS if card.runs_on(here)]


def chosen(here: gpu.Gpu, given: Inputs) -> Card:
    """The card of the kernel that is launched on a GPU, by what a captured graph keeps: shapes,
    strides, types, the scale of the scores, and whether addresses are multiples of 16 bytes."""
    return next(card for card in CARDS if card.takes(here, given))


def planned(here: gpu.Gpu, decodes: Decodes) -> Card:
    """The card of the kernel for which such decodes are planned on a GPU."""
    return next(card for card in of(here) if card.plans(decodes))


def settings(here: gpu.Gpu, decodes: Decodes) -> dict[str, int]:
    """Arguments of `allocate` for such decodes on a GPU."""
    return planned(here, decodes).settings(here, decodes)


def why_no_sparse(here: gpu.Gpu) -> Decline | None:
    """Why sparse decode is not compiled for a GPU; None if it is."""
    if here.vendor != "AMD" or (version := gpu.triton_version()) >= (3, 7):
        return None
    why = "Triton {}.{} does not compile the sparse decode for AMD GPUs, 3.7 does"
    return Decline("provider-unavailable", why.format(*version))
