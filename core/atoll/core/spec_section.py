"""Base of all run-spec sections: frozen, unknown keys are errors, numbers are bounded."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 2**53  # exact in JSON and as a double

Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Rate = Annotated[float, Field(gt=0, le=10)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of a run spec."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
