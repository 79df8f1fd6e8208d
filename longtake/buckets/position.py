"""The form of a data position, as a checkpoint's `run.json` has it: checked before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtake.contracts import UserError

_Count = Annotated[int, Field(ge=0, le=1 << 53)]
_LastKeys = dict[str, Annotated[int, Field(ge=0, lt=1 << 64)]]  # by bucket


class _FinishedEra(BaseModel):
    model_config = ConfigDict(strict=True)

    rule: dict[str, Any]
    views: _Count
    last: _LastKeys


class _Position(BaseModel):
    model_config = ConfigDict(strict=True)

    seed: int
    stage: int
    pass_index: _Count = Field(alias="pass")
    window: _Count
    slots: _Count
    window_start: _LastKeys
    last: _LastKeys
    eras: list[_FinishedEra]
    rule: dict[str, Any]
    views: _Count
    inputs: str
    clips: Annotated[list[Any], Field(min_length=2, max_length=2)] | None = None


def check_position(state: Mapping[str, Any]) -> None:
    """Raise `UserError` for a position whose fields are missing or of another kind."""
    try:
        _Position.model_validate(dict(state))
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        value = "" if fault["type"] == "missing" else f" = {repr(fault['input'])[:60]}"
        raise UserError(
            f"order state: {place}{value}: {fault['msg']}; the checkpoint is damaged, choose another one"
        ) from None
