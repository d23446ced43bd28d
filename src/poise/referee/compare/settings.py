"""The settings of the comparison itself. All other settings belong to its runs."""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, Strict, ValidationError, model_validator

from poise._lib.errors import short
from poise.training.config.documents import ConfigError, Document
from poise.training.config.groups import Group
from poise.training.config.messages import explain

TUNING = 10_000  # the first tuning seed
MOST_SEEDS = 1000
LONGER = 2.0  # the default of ``longer``


def _seeds(value: Any) -> tuple[int, ...]:
    """Parse the number of seeds, or a range such as ``20-29``."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value)):
        first, last = int(match[1]), int(match[2])
        if last < TUNING and 1 <= last - first < MOST_SEEDS:
            return tuple(range(first, last + 1))
    elif type(value) is int and 2 <= value <= MOST_SEEDS:
        return tuple(range(value))
    if value == 1:
        raise ValueError("one seed cannot tell a difference from chance; use at least 2, ideally 10")
    raise ValueError(
        f"must be a number of seeds from 2 to {MOST_SEEDS}, or the first and the last seed, such as 20-29, below "
        f"{TUNING} (where tuning seeds begin)"
    )


Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]


class Settings(Group):
    """All settings of a comparison except its folder. The first five do not change its results."""

    jobs: Annotated[Whole, Field(ge=1, le=1024)] | None = None  # runs in parallel; None: depends on the device
    threads: Annotated[Whole, Field(ge=1, le=1024)] = 1  # per run on a CPU
    hours: Annotated[Real, Field(gt=0)] = inf  # no run starts after this time
    retries: Annotated[Whole, Field(ge=0, le=100)] = 0  # how often a failed run is repeated
    keep: Literal["models", "results"] = "models"  # models: keep each run's newest checkpoint
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = tuple(range(10))
    tune: Annotated[Whole, Field(ge=0, le=MOST_SEEDS)] = 0
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field({})  # lists of values, by setting
    arms: Annotated[list[Annotated[dict[str, Any], Field(min_length=1)]], Field(min_length=1)] | None = None
    baseline: Any = None  # the name of an arm
    controls: Literal["none", "auto"] = "none"
    measure: Literal["accuracy", "speed"] = "accuracy"  # speed: also compare how fast arms learn
    longer: Annotated[Real, Field(ge=1, le=100)] = LONGER  # the baseline's steps, in multiples of the cut
    margin: Annotated[Real, Field(ge=0, le=1)] | None = None  # differences in speed up to this share count as equal

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that choose a learning rate."""
        return tuple(range(TUNING, TUNING + self.tune))

    @property
    def compared(self) -> Document:
        """The measure, as in ``plan.json``."""
        longer = self.longer if self.measure == "speed" else 1.0
        return {"name": self.measure, "longer": longer, "margin": self.margin}

    @model_validator(mode="after")
    def _speed_has_its_settings(self) -> Self:
        for key in self.model_fields_set & {"longer", "margin"} if self.measure != "speed" else ():
            value = short(getattr(self, key))
            raise ValueError(f"{key} = {value}: this setting needs measure=speed")
        return self


def validated(document: Document) -> Settings:
    """Validate a document that has only these settings. Raises ConfigError with a line for each problem."""
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            *(explain(problem, list(Settings.model_fields)) for problem in error.errors(include_url=False))
        ) from None
