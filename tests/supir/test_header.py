"""The strict header reader: what it returns, what it refuses and why, and that nothing escapes."""

from __future__ import annotations

import io
import json
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from supir_xpu.supir.errors import CheckpointError
from supir_xpu.supir.safetensors_header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    TensorInfo,
    parse_header,
    read_header,
)


def entry(shape=(2, 3), dtype="F32", start=0, nbytes=24, **extra):
    return {
        "dtype": dtype,
        "shape": list(shape),
        "data_offsets": [start, start + nbytes],
        **extra,
    }


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def refuse(path):
    """Return the message of the refusal; it always names the file."""
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert path.name in str(caught.value)
    return str(caught.value)


# What it returns


def test_agrees_with_the_library_on_a_real_file(file):
    tensors = {
        "a": torch.zeros(2, 3, dtype=torch.float16),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "fp8": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "brain": torch.zeros(1, 7, 1, dtype=torch.bfloat16),
        "naïve ☃": torch.zeros(3, dtype=torch.uint8),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert {k: v.shape for k, v in header.items()} == {
        k: tuple(v.shape) for k, v in tensors.items()
    }
    assert {k: v.nbytes for k, v in header.items()} == {k: v.nbytes for k, v in tensors.items()}
    with safe_open(file, framework="pt") as f:
        assert set(header) == set(f.keys())
        assert all(f.get_slice(k).get_dtype() == header[k].dtype for k in header)


def test_reads_nothing_behind_the_header(file, monkeypatch):
    write(file, {"a": entry((1 << 20,), nbytes=4 << 20)}, bytes(4 << 20))
    reads = []

    class CountingFile(io.FileIO):
        def read(self, size=-1):
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(Path, "open", lambda self, mode: CountingFile(self, mode))
    assert read_header(file) == {"a": TensorInfo("F32", (1 << 20,), 4 << 20)}
    assert min(reads) > 0
    assert sum(reads) < 200


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_type_has_the_library_s_size(file, dtype):
    nbytes = 12 * DTYPE_BITS[dtype] // 8
    write(file, {"a": entry((3, 4), dtype, nbytes=nbytes)}, bytes(nbytes))
    assert read_header(file)["a"].nbytes == nbytes
    with safe_open(file, framework="numpy") as f:  # refuses a wrong size when it opens
        assert list(f.keys()) == ["a"]


def test_an_empty_model_and_metadata_and_padding_are_valid(file):
    assert read_header(write(file, {})) == {}
    assert read_header(write(file, {"__metadata__": {"a": "b"}})) == {}
    padded = json.dumps({"a": entry()}).encode() + b"     "
    assert list(read_header(write(file, padded, bytes(24)))) == ["a"]


# What it refuses


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (b"<!DOCTYPE html><html><head><title>Sign in</title>", "web page"),
        (b"\xef\xbb\xbf\r\n  <HTML lang='en'><body>403", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "PyTorch checkpoint"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "PyTorch checkpoint"),
        (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00", "GGUF"),
        (b'{"error":"Invalid username or password."}', "JSON"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03rest", "gzip"),
        (b"7z\xbc\xaf\x27\x1c\x00\x04rest of archive", "7-Zip"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "PNG"),
        (bytes(4096), "unfinished download"),
        (b"", "empty"),
        (b"GGUF", "GGUF"),
        (b"abc", "only 3 bytes"),
    ],
)
def test_names_files_that_are_something_else(file, start, word):
    file.write_bytes(start)
    message = refuse(file)
    assert word in message
    file.write_bytes(start + b"\xff" * 3000 if start else b"")
    if word not in ("only 3 bytes",):
        assert word in refuse(file)


def test_a_header_length_beyond_the_file_or_the_limit(file):
    message = refuse(write(file, {}, length=5000))
    assert "5,000" in message
    assert "10 bytes" in message
    with file.open("wb") as f:  # sparse: a file large enough for the announced header
        f.write(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{")
        f.truncate(MAX_HEADER_BYTES + 100)
    assert f"{MAX_HEADER_BYTES:,}" in refuse(file)


def test_a_truncated_file_says_how_many_bytes_are_missing(file):
    write(file, {"a": entry(nbytes=24), "b": entry(start=24)}, bytes(40))
    message = refuse(file)
    assert "48 bytes" in message
    assert "8 too few" in message
    assert "Download" in message


BAD_ENTRIES = {
    "not an object": 5,
    "a list": [],
    "no dtype": {"shape": [], "data_offsets": [0, 24]},
    "no shape": {"dtype": "F32", "data_offsets": [0, 24]},
    "no offsets": {"dtype": "F32", "shape": [2, 3]},
    "unknown type": entry(dtype="F31"),
    "type is a number": entry(dtype=32),
    "type is a list": entry(dtype=["F32"]),
    "shape is a text": {**entry(), "shape": "2x3"},
    "shape is null": {**entry(), "shape": None},
    "negative": entry((-2, -3)),
    "fraction": entry((2.0, 3)),
    "bool": entry((True, 6)),
    "nested": {**entry(), "shape": [[2, 3]]},
    "huge": entry((2**62, 2**62)),
    "wrong size": entry((2, 4)),
    "three offsets": {**entry(), "data_offsets": [0, 24, 24]},
    "backwards": {**entry(), "data_offsets": [24, 0]},
    "negative offset": {**entry(), "data_offsets": [-24, 0]},
    "bool offset": {**entry((), "U8"), "data_offsets": [False, True]},
    "more fields": entry(scale=2),
    "endless zeros": entry((0, 2**40, 2**40), nbytes=0),
    "odd bits": entry((3,), "F4", nbytes=2),
}


@pytest.mark.parametrize("bad", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_malformed_entries(file, bad):
    assert "'weight'" in refuse(write(file, {"weight": bad}, bytes(24)))


BAD_TABLES = {
    "overlap": ({"a": entry(), "b": entry(start=20)}, 44, "overlaps"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, 24, "overlaps"),
    "hole": ({"a": entry(start=8)}, 32, "hole"),
    "trailing bytes": ({"a": entry()}, 30, "6 bytes follow"),
    "data without tensors": ({}, 3, "3 bytes follow"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize(("table", "size", "word"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_tables_that_do_not_add_up(file, table, size, word):
    assert word in refuse(write(file, table, bytes(size)))


BAD_TEXTS = {
    "not UTF-8": (b'{"\xff": 1}', "UTF-8"),
    "cut": (b'{"a": {', "not JSON"),
    "two values": (b"{} {}", "not JSON"),
    "list": (b"  [1, 2]", "no '{'"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "infinity": (b'{"a": -Infinity}', "Infinity"),
    "a key twice": (b'{"a": 1, "a": 2}', "twice"),
    "a field twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "twice"),
    "endless number": (b'{"a": ' + b"9" * 5000 + b"}", "5,000 digits"),
    "deep": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested"),
    "deep list": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
    "minus zero": (b'{"a": {"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', "-0"),
    "half a character in metadata": (b'{"__metadata__": {"a": "\\udc00"}}', "text"),
    "half a character": (b'{"\\ud800": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', "text"),
}


@pytest.mark.parametrize(("text", "word"), BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
def test_texts_that_are_no_header(file, text, word):
    assert word in refuse(write(file, text))


def test_a_header_that_is_no_object():
    with pytest.raises(CheckpointError, match="JSON list"):
        parse_header(b"[1]", 0, "list.safetensors")


def test_unreadable_paths(tmp_path):
    assert "cannot be read" in refuse(tmp_path)
    assert "cannot be read" in refuse(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header("a\0b.safetensors")


def test_messages_stay_short_and_ascii(file):
    key = "ключ" * 5000
    message = refuse(write(file, {key: entry((10**20,) * 500)}, bytes(24)))
    assert message.isascii()
    assert len(message) < 1500


# Nothing else escapes


def mutate_tree(rng, value, depth=0):
    """Return JSON with one random place changed to something surprising."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: mutate_tree(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], mutate_tree(rng, value[i], depth + 1), *value[i + 1 :]]
    nested = 1
    for _ in range(rng.choice([1, 3, 50])):
        nested = [nested]
    return rng.choice(
        [
            None, True, False, -1, 0, 1, 3, 24, 2**31, 2**63, 2**64, 10**25, -(10**25), 10**60,
            0.5, 1e308, float("nan"), float("inf"), "", "F32", "F16", "BF16", "F8_E4M3", "\ud800",
            "\u0000", "ключ", [], [0], [1, 2, 3], [-1], [0, 0], [2**40, 2**40], nested, {}, {"a": 1},
        ]
    )  # fmt: skip


def mutate_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        kind = rng.randrange(4)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(5)))
        else:
            del data[at : at + rng.randrange(1, 20)]
    return bytes(data)


def mutate_text(rng, text):
    pieces = [
        b'"a":1,"a":1,', b"NaN", b"[" * 5000, b'{"x":' * 3000, b"9" * 4400, b"1e999", b"\\ud800",
        b"-0", b",", b"}", b"\xc3\x28", b"null", b"\x00", b'"__metadata__":{"k":5},', b"0x1",
    ]  # fmt: skip
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(pieces) + text[at + rng.choice([0, 0, 1, 5]) :]


def make_case(rng, base, data):
    """Return the bytes of one mutated file."""
    how = rng.randrange(5)
    text = json.dumps(base).encode()
    if how == 0:
        return mutate_bytes(rng, struct.pack("<Q", len(text)) + text + data)
    if how == 1:
        whole = struct.pack("<Q", len(text)) + text + data
        return whole[: rng.randrange(len(whole) + 1)]
    if how == 2:
        tree = mutate_tree(rng, base)
        text = json.dumps(tree).encode()  # NaN and lone surrogates come out as written
    elif how == 3:
        text = mutate_text(rng, text)
    else:
        text = mutate_bytes(rng, text)
    return struct.pack("<Q", len(text)) + text + data


def test_twelve_thousand_damaged_files_give_a_table_or_a_checkpoint_error(file, monkeypatch):
    base = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry(),
        "b.weight": entry((4, 1, 3, 3), "F16", 24, 72),
        "c.bias": entry((), "BF16", 96, 2),
        "d.empty": entry((0, 7), "F8_E5M2", 98, 0),
    }
    data = bytes(range(98))
    rng = random.Random(20240611)
    outcomes = {"table": 0, "refused": 0}
    messages = []
    begin = time.process_time()
    blob = b""
    monkeypatch.setattr(Path, "open", lambda self, mode: io.BytesIO(blob))  # spares the disk
    for i in range(12_000):
        blob = make_case(rng, base, data)
        try:
            header = read_header(file)
        except CheckpointError as e:
            outcomes["refused"] += 1
            messages.append(str(e))
            continue
        outcomes["table"] += 1
        assert all(isinstance(info, TensorInfo) for info in header.values())
        length = int.from_bytes(blob[:8], "little")
        assert sum(info.nbytes for info in header.values()) == len(blob) - 8 - length
        if i % 5 == 0:  # what we accept, the library accepts
            with io.FileIO(file, "wb") as written:
                written.write(blob)
            with safe_open(file, framework="numpy") as f:
                assert set(f.keys()) == set(header)
    assert time.process_time() - begin < 30  # about 3 s when measured
    assert all(m.isascii() and "'model.safetensors'" in m for m in messages)
    assert outcomes["refused"] > 8_000
    assert outcomes["table"] > 200  # mutations of names, metadata and padding stay valid


def test_what_the_library_refuses_is_refused(file):
    """On random JSON mutations of the header we are never more lenient than the library."""
    base = {"a": entry(), "b": entry((3,), "F16", 24, 6)}
    rng = random.Random(7)
    disagreements = []
    for _ in range(800):
        write(file, json.dumps(mutate_tree(rng, base)).encode(), bytes(30))
        try:
            with safe_open(file, framework="numpy"):
                accepted = True
        except (SafetensorError, OSError, ValueError):
            accepted = False
        try:
            read_header(file)
        except CheckpointError:
            continue
        if not accepted:
            disagreements.append(file.read_bytes())
    assert disagreements == []


def test_a_hostile_shape_costs_no_time():
    shape = [10**29] * 200_000
    table = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    text = json.dumps(table).encode()
    begin = time.process_time()
    with pytest.raises(CheckpointError):
        parse_header(text, 4, "hostile.safetensors")
    assert time.process_time() - begin < 5
