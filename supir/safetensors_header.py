"""Read the header of a safetensors file strictly: names, types and shapes, never tensor data.

Owns the file format only. What the names mean is decided in ``detect`` and ``checkpoint``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Longest header accepted (the safetensors library's own limit)."""

LENGTH_BYTES = 8
"""The file begins with the header's length, unsigned 64 bit, little endian."""

METADATA_KEY = "__metadata__"

_FIELDS = {"dtype", "shape", "data_offsets"}
_TOO_LARGE = 2**63
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element. Source: the safetensors library's list of types, release 0.8."""

_AGAIN = "Download or copy the file again, and compare its size with the one its publisher states."
_TORCH = (
    "It is a PyTorch checkpoint (.ckpt, .pt or .pth) under another name. Give it back its real "
    "ending, or get the .safetensors release of the same model."
)
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "It is a Git LFS pointer, a text of a few lines that stands for the real file. Fetch the "
        "file itself: `git lfs pull` in its folder, or the download button of its web page.",
    ),
    (b"PK\x03\x04", _TORCH),
    (b"\x80\x02", _TORCH),
    (b"\x80\x03", _TORCH),
    (b"\x80\x04", _TORCH),
    (b"\x80\x05", _TORCH),
    (
        b"GGUF",
        "It is a GGUF file under another name. GGUF models need a GGUF loader; SUPIR itself is "
        "published as .safetensors.",
    ),
    (b"\x1f\x8b", "It is a gzip archive. Unpack it first."),
    (b"7z\xbc\xaf\x27\x1c", "It is a 7-Zip archive. Unpack it first."),
    (b"Rar!", "It is a RAR archive. Unpack it first."),
    (b"\x89PNG", "It is a PNG picture."),
    (b"\xff\xd8\xff", "It is a JPEG picture."),
    (b"RIFF", "It is a picture, sound or film (RIFF)."),
    (b"%PDF", "It is a PDF document."),
)
_PAGE_STARTS = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes:
        dtype: the format's name of the element type, such as ``F16`` or ``F8_E4M3``.
        shape: may be empty (a scalar) and may hold zeros.
        nbytes: bytes its data occupies in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class _BadJsonError(ValueError):
    """The header is JSON of a kind that safetensors does not allow."""


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Return every tensor a safetensors file declares, in the header's order.

    Reads the first 8 bytes and the header they announce, nothing behind it, and checks that the
    declared tensors fill the rest of the file exactly.

    Raises: CheckpointError if the file cannot be read, is something else, or is damaged.
    Source: the safetensors format (github.com/huggingface/safetensors, "Format").
    """
    path = Path(path)
    head, text, size = _read_start(path)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if not text.lstrip(b" \t\r\n").startswith(b"{"):
        _refuse_start(path.name, head + text[:512], size)
    if len(text) < length:
        _damaged(
            path.name,
            f"its header should be {length:,} bytes long but the file ended after {len(text):,}",
            "It was cut while being read.",
        )
    return parse_header(text, size - LENGTH_BYTES - length, path.name)


def parse_header(text: bytes, data_bytes: int, name: str) -> dict[str, TensorInfo]:
    """Return the tensors of one header.

    Args:
        text: the JSON header, without the 8 bytes of its length.
        data_bytes: bytes of the file behind the header.
        name: file name for messages.
    Raises: CheckpointError if anything about the header is not as the format says.
    """
    table = _parse_json(text, name)
    _check_metadata(table.pop(METADATA_KEY, None), name)
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for key, entry in table.items():
        info, start, end = _parse_entry(key, entry, name)
        tensors[key] = info
        spans.append((start, end, key))
    _check_spans(spans, data_bytes, name)
    return tensors


def _read_start(path: Path) -> tuple[bytes, bytes, int]:
    """Return the first bytes, the header behind them (empty if impossible) and the file's size."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            if len(head) < LENGTH_BYTES or not 0 < length <= _longest_header(size):
                return head + file.read(512), b"", size
            return head, file.read(length), size
    except (OSError, ValueError) as e:  # ValueError: a path with a zero byte
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise CheckpointError(
            f"{_quote(path.name)} cannot be read: {reason}. Check that it is a file, that it is "
            "still in its folder, and that this user may read it."
        ) from e


def _longest_header(size: int) -> int:
    return min(size - LENGTH_BYTES, MAX_HEADER_BYTES)


def _quote(text: str) -> str:
    """Return text shortened and in plain ASCII, so that every console can show it."""
    return ascii(text if len(text) <= 120 else f"{text[:117]}...")


def _damaged(name: str, what: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{_quote(name)} is not a usable safetensors file: {what}. {why} {_AGAIN}"
    )


def _refuse_start(name: str, head: bytes, size: int) -> NoReturn:
    """Raise for a file whose first bytes cannot begin a safetensors file; say what it is."""
    if size == 0:
        _damaged(name, "it is empty (0 bytes)", "The download never started or was cut.")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    advice = next((say for start, say in _SIGNATURES if head.startswith(start)), None)
    if advice is None and text.startswith(_PAGE_STARTS):
        advice = (
            "It is a web page: the server sent a login, licence or error page instead of the "
            "model. Open the link in a browser, sign in or accept the licence, and download again."
        )
    if advice is None and text.startswith((b"{", b"[")):
        advice = "It is a JSON text, such as the error reply of a download server. " + _AGAIN
    if advice is not None:
        raise CheckpointError(
            f"{_quote(name)} ({size:,} bytes) is not a safetensors file. {advice}"
        )
    if size < LENGTH_BYTES:
        _damaged(name, f"it is only {size} bytes long", "The shortest possible is 8 + 2 bytes.")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length == 0:
        why = "It begins with zeros, as the reserved space of an unfinished download does."
    elif length > MAX_HEADER_BYTES:
        why = f"No header is longer than {MAX_HEADER_BYTES:,} bytes."
    elif length > size - LENGTH_BYTES:
        why = "The download was cut, or the file is of another kind."
    else:
        why = "Where the header should begin there is no '{'."
    _damaged(
        name, f"its first 8 bytes announce a header of {length:,} bytes in {size:,} bytes", why
    )


def _reject_constant(text: str) -> NoReturn:
    raise _BadJsonError(f"{text} is not a number that JSON knows")


def _whole(text: str) -> int:
    if len(text) > 30:
        raise _BadJsonError(f"it holds a number of {len(text):,} digits")
    if text == "-0":
        raise _BadJsonError("it holds the number -0")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header; refuse a key twice, and text that UTF-8 cannot hold."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _BadJsonError(f"the key {_quote(key)} occurs twice")
        for text in (key, value):
            if isinstance(text, str) and not text.isascii() and _LONE_SURROGATE.search(text):
                raise _BadJsonError(f"{_quote(text)} is not text")
        result[key] = value
    return result


def _parse_json(text: bytes, name: str) -> dict[str, Any]:
    try:
        table = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_reject_constant,
            parse_int=_whole,
        )
    except UnicodeDecodeError as e:
        _damaged(name, f"byte {e.start:,} of its header is not UTF-8", "The header is damaged.")
    except json.JSONDecodeError as e:
        _damaged(name, f"its header is not JSON ({e.msg} at character {e.pos:,})", "It is damaged.")
    except RecursionError:
        _damaged(name, "its header is nested hundreds of levels deep", "Two levels are allowed.")
    except _BadJsonError as e:
        _damaged(name, f"its header is not valid: {e}", "It is damaged or was made by hand.")
    if not isinstance(table, dict):
        kind = type(table).__name__
        _damaged(name, f"its header is a JSON {kind}", "It must be an object of tensors.")
    return table


def _check_metadata(metadata: Any, name: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged(
            name, f"{METADATA_KEY} is not an object of texts", "The format allows nothing else."
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _TOO_LARGE  # bool is an int to isinstance


def _parse_entry(key: str, entry: Any, name: str) -> tuple[TensorInfo, int, int]:
    """Return one tensor and the start and end of its data, in bytes behind the header."""
    label = f"tensor {_quote(key)}"
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        _damaged(
            name,
            f"{label} is not described by dtype, shape and data_offsets",
            "The header is damaged.",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _damaged(
            name,
            f"{label} has the unknown type {_show(dtype)}",
            f"Known are {', '.join(DTYPE_BITS)}.",
        )
    if not _is_list_of_counts(shape):
        _damaged(name, f"{label} has the shape {_show(shape)}", "Sizes are whole numbers >= 0.")
    if not _is_list_of_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(
            name,
            f"{label} has the data_offsets {_show(offsets)}",
            "They are [start, end] in bytes.",
        )
    start, end = offsets
    if _count_bits(shape, DTYPE_BITS[dtype]) != 8 * (end - start):
        _damaged(
            name,
            f"{label} of shape {_show(shape)} and type {dtype} cannot fill the "
            f"{_show(end - start)} bytes its offsets give it",
            "The header is damaged or was made by hand.",
        )
    return TensorInfo(dtype, tuple(shape), end - start), start, end


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _show(value: Any) -> str:
    """Return a short ASCII text of any JSON value, however large."""
    if isinstance(value, list):
        items = ["[...]" if isinstance(item, list) else _show(item) for item in value[:8]]
        return f"[{', '.join(items)}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    return _quote(value) if isinstance(value, str) else repr(value)[:60]


def _count_bits(shape: list[int], bits: int) -> int | None:
    """Return the bits of a tensor, or None where even the sides but the zeros are too many."""
    for size in filter(None, shape):
        bits *= size
        if bits >= _TOO_LARGE:
            return None
    return 0 if 0 in shape else bits


def _check_spans(spans: list[tuple[int, int, str]], data_bytes: int, name: str) -> None:
    """Raise unless the tensors cover the data exactly: no hole, no overlap, nothing behind."""
    spans.sort()
    declared = max((end for _, end, _ in spans), default=0)
    if declared > data_bytes:
        _damaged(
            name,
            f"its tensors need {declared:,} bytes and {data_bytes:,} are there, "
            f"{declared - data_bytes:,} too few",
            "The end of the file is missing: the download or copy was cut.",
        )
    reached = 0
    for start, end, key in spans:
        if start != reached:
            what = "overlaps the one before" if start < reached else "leaves a hole before it"
            _damaged(
                name,
                f"tensor {_quote(key)} starts at byte {start:,} and {what}, which ends at {reached:,}",
                "Tensors must follow each other without gaps.",
            )
        reached = end
    if reached != data_bytes:
        _damaged(
            name,
            f"{data_bytes - reached:,} bytes follow the last tensor, which ends at {reached:,}",
            "The file was joined with another or damaged.",
        )
