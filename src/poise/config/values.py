"""The types of single settings, with their limits."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    # pydantic would take true for 1 and "3" for 3.
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _valid_text(value: str) -> str:
    os.fsencode(value)  # most texts are file names
    if "\0" in value:
        raise ValueError("must not contain the character NUL")
    return value


LARGEST = 2**31 - 1  # so that counts and seeds fit wherever they go
Whole = Annotated[int, BeforeValidator(_number), Field(ge=-LARGEST, le=LARGEST)]
Real = Annotated[float, BeforeValidator(_number)]
TokenCount = Annotated[int, BeforeValidator(_number), Field(ge=1, le=2**53)]  # beyond, floats would not be exact
Count = Annotated[Whole, Field(ge=1)]
CountOrZero = Annotated[Whole, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_valid_text)]


class Group(BaseModel):
    """A group of settings. Unknown keys are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def lists_for_tuples(value: Any) -> Any:
    """The value with lists in place of tuples, so that it is the same after a trip through YAML or JSON."""
    if isinstance(value, dict):
        return {key: lists_for_tuples(part) for key, part in value.items()}
    return [lists_for_tuples(part) for part in value] if isinstance(value, list | tuple) else value
