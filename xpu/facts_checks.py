"""Is one value of a device description, from a file or a person, one that can be meant? Pure."""

from __future__ import annotations

from typing import cast

import torch

from .errors import FactsError

MOST = 1e24
"""A number of a device description from which on it can only be a mistake (our choice)."""

KINDS_OF_VALUES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple[str, ...]": (list, tuple),
    "Mapping[str, str]": (dict,),
}


def checked(key: str, value: object, kind: str, words: tuple[str, ...] | None = None) -> object:
    """Return one value of a device description as ``DeviceFacts`` holds it.

    Args:
        kind: the field's type, a key of ``KINDS_OF_VALUES``. words: the only texts it may be.
    Raises: FactsError naming the key.
    """
    wanted = KINDS_OF_VALUES[kind]
    is_bool = isinstance(value, bool)
    if not isinstance(value, wanted) or (is_bool and bool not in wanted):
        raise FactsError(
            f"The device description's '{key}' is {value!r}, a {type(value).__name__}; it must be "
            f"{kind}. Correct that key."
        )
    if isinstance(value, (int, float)) and not is_bool and not 0 <= value <= MOST:
        raise FactsError(  # NaN fails the comparison too
            f"The device description's '{key}' is {_shown(value)}; it must be a number from 0 to "
            f"{MOST:.0e}."
        )
    if key == "dtypes":
        _check_dtypes(cast("list[object]", value))
    if words is not None and value not in words:
        raise FactsError(
            f"The device description's '{key}' is {value!r}; it must be one of {', '.join(words)}."
        )
    if isinstance(value, str) and "${" in value:
        raise FactsError(
            f"The device description's '{key}' is {value!r}; '${{' would read another value or the "
            f"environment, and is not allowed. Write the value itself."
        )
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in cast("list[object]", value))
    if isinstance(value, dict):
        return {str(k): str(v) for k, v in cast("dict[object, object]", value).items()}
    return float(value) if kind == "float" else value  # pyright: ignore[reportArgumentType]


def _shown(number: float) -> str:
    """Return a number in words; one of more digits than a message should hold by its size."""
    digits = int(number.bit_length() * 0.30103) + 1 if isinstance(number, int) else 0
    return f"an integer of about {digits} digits" if digits > 40 else str(number)


def _check_dtypes(names: list[object] | tuple[object, ...]) -> None:
    for name in names:
        if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
            raise FactsError(
                f"The device description's 'dtypes' holds {name!r:.80}; it must hold names of torch "
                f"dtypes: float32, float16, bfloat16."
            )
    if not names:
        raise FactsError(
            "The device description's 'dtypes' is empty; name at least one that works, for example "
            "float32."
        )
