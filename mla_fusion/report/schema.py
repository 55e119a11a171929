"""The stored format of a report: what `load` takes from a file, and nothing else.

It imports pydantic, which vLLM brings, so `load` imports it when there is a file to read.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mla_fusion.ops import Variant
from mla_fusion.report.files import FormatError
from mla_fusion.report.layer_graph import LayerGraph
from mla_fusion.report.reasons import REASONS

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _known(code: str) -> str:
    if code not in REASONS:
        raise ValueError(f"unknown reason {code[:40]!r}")
    return code


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1]:
        raise ValueError("an empty range")
    return span


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Layers(_Strict):
    """Layers that declined for one reason, and what was found on the first."""

    layers: Count
    detail: str


_Declined = dict[Annotated[str, AfterValidator(_known)], _Layers]


class StoredRange(_Strict):
    """`RangeReport`."""

    range: Annotated[tuple[Count, Count], AfterValidator(_ordered)]
    layers: Count
    fused: Count
    declined: _Declined
    layer: LayerGraph | None
    variants: list[Variant]
    outputs: dict[str, Count]
    plain_outputs: _Declined
    pass_ms: float


class _Version(BaseModel):
    model_config = ConfigDict(strict=True)
    version: int


class StoredReport(_Strict):
    """`Report`."""

    provider: str
    bucket: Count
    ranges: list[StoredRange]
    model: str
    versions: dict[str, str]
    uncompiled: Count
    others: Count
    ranks: Annotated[int, Field(ge=1, le=2**31 - 1)]
    differing: list[str]
    attention: str
    epilogue: str
    version: int


def parse(text: bytes, name: str, version: int) -> StoredReport:
    """What a file called `name` holds, in the stored format `version`.

    Raises:
        FormatError: it holds no report, or one of another version.
    """
    try:
        if _Version.model_validate_json(text).version != version:
            raise FormatError(f"{name} was stored by another release of mla-fusion")
        return StoredReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        why = " ".join(f"{at[:80]} {first['msg'][:120]}".split())
        raise FormatError(f"{name} is not a stored report: {why}") from None
