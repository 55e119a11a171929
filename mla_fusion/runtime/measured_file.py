"""The form of a GPU's file: what `measured.read` reads, which imports this, and with it pydantic,
only when there is one."""

from typing import Annotated

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

_Time = PositiveFloat
_Row = tuple[PositiveInt, PositiveInt, NonNegativeInt, _Time, _Time, _Time, _Time, _Time, _Time]


class _Shape(BaseModel, strict=True, allow_inf_nan=False):
    dtype: str
    heads: PositiveInt
    queries: PositiveInt
    backend: str
    rows: Annotated[list[_Row], Field(min_length=1)]


class Table(BaseModel, strict=True):
    """A file."""

    gpu: str
    kernels: str = ""
    shapes: list[_Shape]


def parse(content: bytes) -> Table:
    """The content of a file. Raises ValueError with one line on the first place that is wrong."""
    try:
        return Table.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{at[:80]}: {first['msg'][:120]}") from None
