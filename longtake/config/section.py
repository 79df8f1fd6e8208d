"""`Section`: the base of every part of a configuration schema; `OpenSection`: of one that comes in several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from annotated_types import Le, Lt
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

LARGEST_INT, LARGEST_FLOAT = 10**6, 1e30


class Section(BaseModel):
    """One named part of a configuration: typed keys, no unknown ones, immutable once built, defaults checked like given
    values.

    A validator may raise `ValueError`; its text is shown to the user as the rule that was broken. A number whose field
    has no upper bound has that of all numbers; no text has a NUL byte, which no file name may hold.
    """

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {}  # what other programs call a key -> the key, for hints

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=False,
        protected_namespaces=(),
    )

    BENEATH: ClassVar[str] = ""  # dotted name of the key that `beneath` follows from

    @classmethod
    def beneath(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """What follows from a whole configuration as it is written, plain data, for keys that it leaves out."""
        return {}

    @field_validator("*", mode="after")
    @classmethod
    def _within_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        bounded = any(isinstance(rule, (Le, Lt)) for rule in cls.model_fields[info.field_name].metadata)
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, Mapping):
                stack.extend((*item, *item.values()))
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            elif isinstance(item, str) and "\0" in item:
                raise ValueError("must have no NUL byte")
            elif item == "TODO":
                raise ValueError("is a placeholder; write the value, or delete the line")
            elif isinstance(item, (int, float)) and not bounded:
                most = LARGEST_INT if isinstance(item, int) else LARGEST_FLOAT
                if not -most <= item <= most:
                    raise ValueError(f"must be between {-most:,} and {most:,}")
        return value


class OpenSection(Section):
    """A section of one of several kinds, told apart by the value of `type`.

    What derives from it directly is the type of a field; what derives from that, and gives `type` a literal as its
    default, is one of its kinds as soon as it is defined, wherever that is. Annotate fields with `SerializeAsAny`.
    """

    KINDS: ClassVar[dict[str, type[OpenSection]]]  # `type` -> class, of the one that derives directly

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        if OpenSection in cls.__bases__:
            cls.KINDS = {}
        elif isinstance(kind := cls.model_fields["type"].default, str):
            cls.KINDS[kind] = cls

    @classmethod
    def is_open(cls) -> bool:
        """Whether this class stands for all of its kinds."""
        return OpenSection in cls.__bases__

    @model_validator(mode="wrap")
    @classmethod
    def _as_its_kind(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        if not cls.is_open() or not isinstance(value, Mapping):
            return value if cls.is_open() and isinstance(value, cls) else handler(value)
        if "type" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'type'"})
        if (kind := cls.KINDS.get(str(value["type"]))) is None:
            expected = ", ".join(f"'{name}'" for name in cls.KINDS)
            tags = {"discriminator": "'type'", "tag": str(value["type"]), "expected_tags": expected}
            raise PydanticKnownError("union_tag_invalid", tags)
        return kind.model_validate(value)
