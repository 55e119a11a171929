"""The stored format of a report, by pydantic: all fields of its dataclasses, in narrower types."""

import json
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from mla_fusion.files import each_text, printable
from mla_fusion.ops import Norm, Product
from mla_fusion.report.reasons import REASONS, Decline

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1]:
        raise ValueError("an empty range")
    return span


def _declines(stored: dict[str, Any]) -> dict[Decline, int]:
    return {Decline(code, of.detail): of.layers for code, of in stored.items()}


_Code: Any = Literal[tuple(REASONS)]
_Layers: Any = create_model("_Layers", __config__=_STRICT, layers=(_Count, ...), detail=(str, ...))
_NARROWER: Any = {
    int: _Count,
    tuple[int, int]: Annotated[tuple[_Count, _Count], AfterValidator(_ordered)],
    dict[str, int]: dict[str, _Count],
    dict[Product, int]: Annotated[list[tuple[Product, _Count]], AfterValidator(dict)],
    dict[Norm, int]: Annotated[list[tuple[Norm, _Count]], AfterValidator(dict)],
    dict[Decline, int]: Annotated[dict[_Code, _Layers], AfterValidator(_declines)],
}


def _stored(of: type, **narrower: Any) -> Any:
    """The type that pydantic reads into a dataclass."""
    hints = {name: _NARROWER.get(hint, hint) for name, hint in get_type_hints(of).items()}
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in (hints | narrower).items()}
    model = create_model(of.__name__, __config__=_STRICT, **fields)
    return Annotated[model, AfterValidator(lambda found: of(**vars(found)))]


def parse(text: bytes, name: str, report: Any, of_range: Any) -> Any:
    """The `report` that a file called `name` holds, or a ValueError; its ranges are `of_range`."""
    each: Any = _stored(of_range)
    version: Any = Literal[report.version]
    ranks = Annotated[_Count, Field(ge=1)]
    of = _stored(report, ranges=list[each], ranks=ranks, version=version)
    try:
        plain = json.dumps(each_text(json.loads(text), printable, printable))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a stored report: {str(error)[:120]}") from None
    try:
        return TypeAdapter(of).validate_json(plain)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        if ("literal_error", ("version",)) in ((e["type"], e["loc"]) for e in errors):
            raise ValueError(f"{name} was stored by another release of mla-fusion") from None
        at = ".".join(map(str, errors[0]["loc"]))
        why = " ".join(f"{at[:80]} {errors[0]['msg'][:120]}".split())
        raise ValueError(f"{name} is not a stored report: {why}") from None
