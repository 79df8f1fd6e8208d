"""The families there are, found by the `type` of a `model` section."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from longtake.contracts import UserError, in_one_line
from longtake.families.cogvideox import COGVIDEOX
from longtake.families.opensora_v1_2 import OPENSORA_V1_2
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.families.record import Family
from longtake.families.ttt_video import TTT_VIDEO
from longtake.families.wan import WAN
from longtake.models.config import ModelSection

GROUP = "longtake.families"  # of the entry points by which installed packages bring families of their own
_OURS = (OPENSORA_V2, OPENSORA_V1_2, COGVIDEOX, TTT_VIDEO, WAN)  # the first is the default
_FAMILIES: dict[type[ModelSection], Family] = {family.model: family for family in _OURS}


def register(family: Family) -> Family:
    """Make a family known to everything above, in this process alone."""
    _FAMILIES[family.model] = family
    return family


def families() -> tuple[Family, ...]:
    """All of them, the default first. Raises `UserError` where one that is installed cannot be loaded."""
    _load_installed()
    return tuple(_FAMILIES.values())


@cache
def _load_installed() -> None:
    for point in entry_points(group=GROUP):
        try:
            register(point.load())
        except Exception as error:
            raise UserError(
                f"the model family {point.name} ({point.value}) cannot be loaded: {type(error).__name__}: "
                f"{in_one_line(error)}; mend or uninstall the package that brings it"
            ) from error


def family_of(model: ModelSection) -> Family:
    """Return the family of a `model` section."""
    return next(_FAMILIES[kind] for kind in type(model).__mro__ if kind in _FAMILIES)


def default_model() -> ModelSection:
    """Return the `model` section of a run that has none."""
    return families()[0].model.model_validate({})


def family_of_tree(tree: Mapping[str, Any]) -> Family:
    """Return the family that a run's config, as plain data, asks for; the default one where it names none that there
    is."""
    model = tree.get("model")
    kind = model.get("type") if isinstance(model, Mapping) else None
    return next((family for family in families() if family.model.model_fields["type"].default == kind), families()[0])


def published_sections(tree: Mapping[str, Any]) -> tuple[str, Mapping[str, Mapping[str, Any]]] | None:
    """Return the `type` of the model whose whole published folder `model.from_pretrained` of a run names, and what
    that folder says of the run's sections; None where it names none."""
    model = tree.get("model")
    if not isinstance(model, Mapping) or not isinstance(folder := model.get("from_pretrained"), str):
        return None
    for family in [family_of_tree(tree)] if "type" in model else families():
        try:
            sections = family.root(folder)
        except ValueError as error:
            raise UserError(f"model.from_pretrained = {folder!r}: {error}") from error
        if sections is not None:
            return family.model.model_fields["type"].default, sections
    return None


def read_model(tree: Mapping[str, Any]) -> ModelSection:
    """Return the `model` section of a run's config, as plain data. Raises pydantic's `ValidationError`."""
    return family_of_tree(tree).model.model_validate(tree.get("model") or {})
