"""Read settings: YAML files merged onto a dataclass that says which keys exist and of what type.

Owns how settings are read and how a mistake in them is explained. Knows no setting by name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from .errors import SettingsError

Settings = TypeVar("Settings")

_MERGE_ERRORS = (OmegaConfBaseException, TypeError, ValueError)
"""What OmegaConf raises; the builtin ones for a list where a mapping belongs."""

OVERRIDES = "the overrides"
"""Name of the last source in messages, where a file name would stand."""


def load_settings(
    schema: type[Settings],
    *yaml_paths: str | os.PathLike[str],
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Return an instance of the dataclass ``schema``, filled from its defaults and the sources.

    Args:
        schema: dataclass; nested dataclasses, lists and dictionaries of them are allowed. A field
            whose default is ``omegaconf.MISSING`` must be set by a source. Ranges are checked by
            raising ValueError in ``__post_init__``.
        yaml_paths: UTF-8 files, later ones win, key by key; lists are replaced whole.
        overrides: nested, or with dotted keys (``"tiles.size_px": 512``); wins over every file.
    Raises: SettingsError naming source and key for an unknown key, a value of the wrong type, a
        key without value, a reference (``${...}``), a missing file or broken YAML.
    """
    config = OmegaConf.structured(schema)
    sources: list[str] = []
    for path in map(Path, yaml_paths):
        sources.append(ascii(str(path)))
        config = _merge(config, _read_yaml(path), sources[-1])
    if overrides:
        sources.append(OVERRIDES)
        config = _merge(config, _nested(overrides), OVERRIDES)
    origin = " and ".join(sources) or f"the defaults of {schema.__name__}"
    try:
        settings = OmegaConf.to_object(config)
        _check_items(settings, "")
    except MissingMandatoryValue as e:
        raise SettingsError(
            f"The setting {ascii(e.full_key)} has no value in {origin}, and there is no default. "
            "Add it."
        ) from e
    except OmegaConfBaseException as e:
        _explain(e, origin, e.full_key or str(e.key))
    except SettingsError as e:
        raise SettingsError(f"{e} It was read from {origin}.") from e
    except (ValueError, TypeError) as e:  # raised by a dataclass's __post_init__
        raise SettingsError(f"The settings in {origin} cannot work: {e}") from e
    return cast("Settings", settings)


def _read_yaml(path: Path) -> DictConfig:
    label = ascii(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' Notepad may write a byte order mark
        config = OmegaConf.load(io.StringIO(text))
    except UnicodeDecodeError as e:
        raise SettingsError(
            f"The settings file {label} is not UTF-8 text (byte {e.start:,}). Save it as UTF-8."
        ) from e
    except yaml.YAMLError as e:
        raise SettingsError(
            f"The settings file {label} is not valid YAML: {_locate(e)}. Correct that line."
        ) from e
    except RecursionError as e:
        raise SettingsError(
            f"The settings file {label} is nested hundreds of levels deep. No setting needs that."
        ) from e
    except OmegaConfBaseException as e:
        raise SettingsError(
            f"The settings file {label} has a key that cannot be used: {_first_line(e)}. "
            "Write keys as plain words."
        ) from e
    except (OSError, ValueError) as e:  # OmegaConf also raises OSError for a lone number
        reason = e.strerror if isinstance(e, OSError) and e.strerror else _first_line(e)
        raise SettingsError(
            f"The settings file {label} cannot be read: {reason}. Check its name, its folder and "
            "that it holds lines of the form 'key: value'."
        ) from e
    if not isinstance(config, DictConfig):
        raise SettingsError(
            f"The settings file {label} holds a list. It must hold lines of the form 'key: value'."
        )
    _refuse_references(OmegaConf.to_container(config, resolve=False), "", label)
    return config


def _refuse_references(value: Any, key: str, label: str) -> None:
    """Raise for a value that would be looked up elsewhere, for example in the environment."""
    if isinstance(value, str) and "${" in value:
        raise SettingsError(
            f"The setting {ascii(key)} in {label} is {ascii(value)}. '${{' would read another "
            "setting or the environment, which a settings file may not do. Write the value itself."
        )
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            _refuse_references(item, f"{key}.{name}" if key else str(name), label)


def _locate(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or _first_line(error)
    if mark is None:
        return str(problem)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _nested(overrides: Mapping[str, object]) -> DictConfig:
    config = OmegaConf.create({})
    for key, value in overrides.items():
        try:
            OmegaConf.update(config, key, value, merge=True)
        except (*_MERGE_ERRORS, AttributeError) as e:
            raise SettingsError(
                f"The setting {ascii(key)} in {OVERRIDES} cannot be used: {_first_line(e)}."
            ) from e
    return config


def _merge(config: Any, source: DictConfig, label: str) -> Any:
    try:
        return OmegaConf.merge(config, source)
    except _MERGE_ERRORS as e:
        plain = cast("dict[str, Any]", OmegaConf.to_container(source, resolve=False))
        _explain(e, label, getattr(e, "full_key", None) or _find_culprit(config, plain))


def _find_culprit(config: Any, source: Mapping[str, Any]) -> str:
    """Return the dotted key of a source that cannot be merged, for errors that do not tell it."""
    for key, value in source.items():
        try:
            OmegaConf.merge(config, OmegaConf.create({key: value}))
        except _MERGE_ERRORS:
            inside = config.get(key) if isinstance(value, dict) else None
            deeper = _find_culprit(inside, value) if isinstance(inside, DictConfig) else ""
            return f"{key}.{deeper}" if deeper else str(key)
    return ""


def _explain(error: Exception, label: str, full_key: str) -> NoReturn:
    """Raise the SettingsError for an error of OmegaConf."""
    key = ascii(full_key)
    owner: Any = getattr(error, "object_type", None)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and is_dataclass(owner):
        known = ", ".join(field.name for field in fields(owner))
        raise SettingsError(
            f"Unknown setting {key} in {label}. Settings that exist there: {known}. "
            "Correct or remove it."
        ) from error
    raise SettingsError(
        f"The setting {key} in {label} cannot be used: {_first_line(error)}. Give it a value of "
        "the kind its default has."
    ) from error


def _check_items(value: Any, key: str, hint: Any = None) -> None:
    """Raise if a list holds something else than its type says (OmegaConf lets mappings pass)."""
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        for field in fields(value):
            name = f"{key}.{field.name}" if key else field.name
            _check_items(getattr(value, field.name), name, hints[field.name])
        return
    args = get_args(hint)
    if isinstance(value, dict):
        items: list[tuple[str, Any]] = [(f"{key}.{k}", v) for k, v in value.items()]
        inner = args[1] if len(args) == 2 else None
    elif isinstance(value, (list, tuple)):
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
        inner = args[0] if args else None
    else:
        return
    for name, item in items:
        plain = isinstance(inner, type) and get_origin(inner) is None and not is_dataclass(inner)
        anything = inner in (object, Any)  # Any is a class from Python 3.11 on
        if plain and not anything and not isinstance(item, cast("type", inner)):
            raise SettingsError(
                f"The setting {ascii(name)} is {ascii(item)}, but it must be of type "
                f"{cast('type', inner).__name__}."
            )
        _check_items(item, name, inner)
