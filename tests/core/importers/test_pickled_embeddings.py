"""Pickled embeddings of cosmos-rl: read as numpy 1 and 2 write them, and refused where they hold anything else."""

import json
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers._pickled_arrays import PickleError, arrays_in
from cosmos_rl_core.importers.pickled_embeddings import INDEX, MAX_BYTES, import_embeddings
from tests.tar_files import shard

EMBEDDING = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float16)


def pickled(value: Any, protocol: int = 4, numpy: int = 2) -> bytes:
    """A pickle as numpy 1 or 2 writes it: they have other names for one module."""
    data = pickle.dumps(value, protocol)
    if numpy == 2:
        return data
    if protocol < 4:
        return data.replace(b"numpy._core.", b"numpy.core.")
    # In later protocols names have a length, and frames too.
    unframed = b"".join(
        data[place : following if name != "FRAME" else place]
        for (name, place), following in zip(opcodes(data), [*(p for _, p in opcodes(data)[1:]), len(data)], strict=True)
    )
    for module in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        old = module.replace(b"_core", b"core")
        unframed = unframed.replace(b"\x8c" + bytes([len(module)]) + module, b"\x8c" + bytes([len(old)]) + old)
    return unframed


def opcodes(data: bytes) -> list[tuple[str, int]]:
    return [(opcode.name, place or 0) for opcode, _, place in pickletools.genops(data)]


def folder_of(tmp_path: Path, files: dict[str, bytes], name: str = "t5_xxl") -> Path:
    for file, data in files.items():
        path = tmp_path / "in" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "in"


def imported(tmp_path: Path, data: bytes) -> dict[str, np.ndarray]:
    import_embeddings(folder_of(tmp_path, {"a.pickle": data}), tmp_path / "out")
    return load_file(tmp_path / "out/a.safetensors")


def refusal(data: bytes) -> str:
    with pytest.raises(PickleError) as raised:
        arrays_in(data)
    return str(raised.value)


@pytest.mark.parametrize("numpy", [1, 2])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", "<i8", "|u1", "|b1"])
def test_arrays_come_back_as_they_were_written(numpy: int, protocol: int, dtype: str, tmp_path: Path):
    array = (np.arange(40).reshape(5, 8) % 7 - 3).astype(dtype)
    data = pickled([array], protocol, numpy)
    assert (b"numpy.core." in data, b"numpy._core." in data) == (numpy == 1, numpy == 2)
    (found,) = imported(tmp_path, data).values()
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(EMBEDDING),
        EMBEDDING[::2, 1:],
        EMBEDDING.T,
        np.zeros((0, 8), np.float16),
        np.zeros((3, 4), np.float32),
        np.array(2.5, np.float32),
        np.float32(2.5),
        np.frombuffer(EMBEDDING.tobytes(), np.float16),
    ],
    ids=["columns", "parts", "transposed", "empty", "zeros", "no dimension", "scalar", "read only"],
)
def test_arrays_of_every_form_are_read(protocol: int, array: Any, tmp_path: Path):
    (found,) = imported(tmp_path, pickled([array], protocol)).values()
    np.testing.assert_array_equal(found, array)
    assert found.shape == array.shape


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_are_named_by_their_places_and_other_values_are_kept(protocol: int, tmp_path: Path):
    windows = [{"caption": EMBEDDING, "short": (EMBEDDING + 1, 7)}, {"caption": EMBEDDING * 2, "text": "ü", "x": None}]
    found = imported(tmp_path, pickled(windows, protocol))
    assert found.keys() == {"0.caption", "0.short.0", "1.caption"}
    np.testing.assert_array_equal(found["1.caption"], EMBEDDING * 2)
    (entry,) = json.loads((tmp_path / "out" / INDEX).read_bytes()).values()
    assert entry["values"] == {"0.short.1": 7, "1.text": "ü", "1.x": None}
    assert entry["tensors"]["0.caption"] == ["float16", [5, 8]]


def test_the_index_has_the_digests_of_files_and_captions(tmp_path: Path):
    folder = folder_of(tmp_path, {"a.pickle": pickled([EMBEDDING]), "b.pickle": pickled([EMBEDDING])}, "text_embedding")
    (folder / "metas").mkdir()
    (folder / "metas/a.txt").write_text("a robot\n", encoding="utf-8")
    index = import_embeddings(folder, tmp_path / "out")
    assert index == json.loads((tmp_path / "out" / INDEX).read_bytes())
    assert [index[stem]["caption_sha256"] for stem in "ab"] == [sha256(b"a robot"), None]
    assert index["a"]["sha256"] == sha256((tmp_path / "out/a.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="out exists already"):
        import_embeddings(folder, tmp_path / "out")


def test_of_several_imports_at_once_one_writes_a_whole_folder_and_the_others_are_refused(tmp_path: Path):
    (tmp_path / "t5_xxl").mkdir()
    for number in range(20):
        (tmp_path / f"t5_xxl/{number}.pickle").write_bytes(pickled([EMBEDDING]))

    def tried(_: int) -> int | str:
        try:
            return len(import_embeddings(tmp_path, tmp_path / "out"))
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        said = [*pool.map(tried, range(4))]
    assert [one for one in said if isinstance(one, int)] == [20]
    refused = f"{tmp_path / 'out'} exists already; name a folder that does not"
    assert [one for one in said if isinstance(one, str)] == [refused] * 3
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == 20
    assert {path.name for path in tmp_path.iterdir()} == {"t5_xxl", "out"}


def test_members_of_shards_are_read(tmp_path: Path):
    shards = {f"00{n}.tar": shard({f"{n}.pickle": pickled([{"caption": EMBEDDING + n}])}) for n in range(2)}
    index = import_embeddings(folder_of(tmp_path, shards), tmp_path / "out")
    assert [*index] == ["000/0", "001/1"]
    np.testing.assert_array_equal(load_file(tmp_path / "out/001/1.safetensors")["0.caption"], EMBEDDING + 1)


def test_a_shard_writes_nowhere_but_in_its_folder(tmp_path: Path):
    hostile = {
        "0.tar": shard({"../../a.pickle": pickled([EMBEDDING])}),
        "1.tar": shard({"a/b.pickle": pickled([EMBEDDING])}),
        "2.tar": b"no tar",
    }
    with pytest.raises(ConfigError) as raised:
        import_embeddings(folder_of(tmp_path, hostile), tmp_path / "out")
    first, second, third = str(raised.value).splitlines()[1:]
    assert "0.tar: '../../a.pickle' leads out of the folder" in first
    assert "1/a/b: rename it" in second
    assert "2.tar: it ends at byte 6" in third
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_all_mistakes_of_a_folder_are_listed_at_once(tmp_path: Path):
    files = {"a.pickle": pickled(["text"]), "b.pickle": b"", "c d.pickle": b"", "e.pickle": pickled([EMBEDDING])}
    folder = folder_of(tmp_path, files)
    (folder / "t5_xxl/large.pickle").touch()
    os.truncate(folder / "t5_xxl/large.pickle", MAX_BYTES + 1)
    with pytest.raises(ConfigError) as raised:
        import_embeddings(folder, tmp_path / "out")
    assert [line.strip().partition(": ")[::2] for line in str(raised.value).splitlines()[1:]] == [
        ("a", "no array"),
        ("b", "a damaged pickle: pickle exhausted before seeing STOP"),
        ("c d", "rename it to at most 80 letters, digits, '_', '-' and '.'"),
        ("large", f"{MAX_BYTES + 1} bytes, at most {MAX_BYTES} are read"),
    ]
    with pytest.raises(ConfigError, match="has neither; expected one of the folders t5_xxl, text_embedding"):
        import_embeddings(tmp_path, tmp_path / "out")


class Calls:
    """What a pickle calls when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Of:
    """A class of somebody else's."""


RECORDS = np.zeros(2, [("a", "f4")])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "touch harmed"), "posix.system"),
        (Calls(eval, "open('harmed', 'w')"), "eval"),
        (Calls(getattr, EMBEDDING, "tofile"), "getattr"),
        (Calls(np.load, "x.npy"), "numpy.load"),
        (Calls(np.fromfile, "/etc/passwd"), "fromfile"),
        (Calls(pickle.loads, b""), "pickle.loads"),
        (Calls(bytearray, 10**12), "bytearray"),
        (Of(), "test_pickled_embeddings.Of"),
        (Of, "test_pickled_embeddings.Of"),
        (np.array([{}], object), "the dtype 'O8'"),
        (np.array(["text"]), "the dtype 'U4'"),
        (np.array([b"a"]), "the dtype 'S1'"),
        (np.array([1j]), "the dtype 'c16'"),
        (np.array(["2020-01-01"], "datetime64[D]"), "the dtype 'M8'"),
        (RECORDS, "the dtype 'V4'"),
        (RECORDS[0], "the dtype 'V4'"),
        ({1: EMBEDDING}, "a value of type int as a key"),
        ({(1, 2): EMBEDDING}, "a value of type tuple as a key"),
        ([EMBEDDING, {1, 2}], "set"),
        ([EMBEDDING, b"bytes"], "a value of type bytes at 1"),
        ([EMBEDDING, 2.5 + 1j], "complex"),
        ([EMBEDDING, float("nan")], "a value that JSON has not"),
        ({"__metadata__": EMBEDDING}, "'__metadata__' is the place of two values, or a reserved one"),
        ({"a.b": EMBEDDING, "a": {"b": EMBEDDING}}, "'a.b' is the place of two values"),
        (np.dtype("f4"), "a value of type Dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_but_arrays_is_refused_by_its_name(value: Any, named: str, protocol: int):
    assert named.lower() in refusal(pickled(value, protocol)).lower()


def proto(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


RECONSTRUCT = name("numpy._core.multiarray", "_reconstruct")
NDARRAY = RECONSTRUCT + name("numpy", "ndarray") + b"K\0\x85C\x01b\x87R"
STATE = b"(K\x03" + text("<") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\0tb"
F4 = name("numpy", "dtype") + text("f4") + b"\x89\x88\x87R" + STATE
HUGE = b"\x8a\x06" + (2**40).to_bytes(6, "little")


def array(shape: bytes, data: bytes, dtype: bytes = F4) -> bytes:
    return NDARRAY + b"(K\x01" + shape + dtype + b"\x89" + b"B" + struct.pack("<I", len(data)) + data + b"tb"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (proto(array(HUGE + b"\x85", b"abcd")), "an array of shape (1099511627776,) and f4 in 4 bytes"),
        (proto(array(HUGE * 3 + b"\x87", b"")), "an array of shape"),
        (proto(array(b"J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86", b"abcd")), "an array of shape (-1, -1)"),
        (proto(array(b"(" + b"K\x01" * 40 + b"t", b"abcd")), "an array of shape"),
        (proto(array(b"]", b"abcd")), "an array of shape []"),
        (proto(array(b"K\x01\x85", b"abcd", b"N")), "an array of a value of type NoneType"),
        (proto(NDARRAY), "a value of type Array at 0"),
        (proto(array(b"K\x01\x85", b"abcd"), b"(K\x01K\x01\x85", F4, b"\x89C\x04abcdtb"), "Array that is built"),
        (proto(RECONSTRUCT, name("numpy", "dtype"), HUGE, b"\x85C\x01b\x87R"), "numpy.dtype"),
        (proto(name("numpy._core.multiarray", "_reconstruct.__globals__")), "_reconstruct.__globals__"),
        (proto(name("numpy", "ndarray"), b"K\x01\x85R"), "a call of numpy.ndarray"),
        (proto(name("numpy", "ndarray"), b"K\x01\x85\x81"), "the opcode NEWOBJ"),
        (proto(name("numpy", "ndarray"), b"K\x01\x85}\x92"), "the opcode NEWOBJ_EX"),
        (proto(text("os"), text("system"), b"\x93", text("true"), b"\x85R"), "os.system"),
        (proto(b"cos\nsystem\n", text("true"), b"\x85R"), "os.system"),
        (proto(b"(ios\nsystem\n"), "the opcode INST 'os system'"),
        (proto(b"(cos\nsystem\no"), "os.system"),
        (proto(b"\x82\x01"), "the opcode EXT1 '1'"),
        (proto(b"\x83\x01\x01"), "the opcode EXT2 '257'"),
        (proto(b"\x84\x01\0\0\0"), "the opcode EXT4 '1'"),
        (proto(b"Pid\n"), "the opcode PERSID 'id'"),
        (proto(text("id"), b"Q"), "the opcode BINPERSID"),
        (proto(b"\x97"), "the opcode NEXT_BUFFER"),
        (proto(b"\x98"), "the opcode READONLY_BUFFER"),
        (proto(b"]2"), "the opcode DUP"),
        (proto(b"]r\xff\xff\xff\x7f"), "the memo's entry 2147483647 after 0"),
        (proto(b"]\x94h\0a"), "containers deeper than 8"),
        (proto(b"]" * 20, b"a" * 19), "containers deeper than 8"),
        (proto(b"(]\x94", b"".join(b"](" + bytes([104, n]) * 200 + b"e\x94" for n in range(6)), b"l"), "65536 values"),
        (proto(b"(" + b"N" * 70_000 + b"l"), "more than 65536 opcodes"),
        (proto(b"(", array(b"K\x01\x85", b"abcd"), b"\x94", b"h\0" * 200 + b"l"), "an array comes several times"),
        (
            proto(
                name("_codecs", "encode"), b"\x94", text("a" * 200), text("latin1"), b"\x86\x94",
                b"h\0h\x01R" * 100,
            ),
            "bytes that are used several times",
        ),
        (proto(name("_codecs", "encode"), text("a"), text("rot13"), b"\x86R"), "a text in 'rot13'"),
        (proto(b"\x8e" + struct.pack("<Q", 2**62)), "a damaged pickle"),
        (proto(b"a"), "a damaged pickle: fewer values"),
        (proto(b"h\7"), "a damaged pickle"),
        (proto(b"]]"), "a damaged pickle: too many values"),
        (proto(b"(]"), "a damaged pickle: too many values"),
        (proto(b"]t"), "a damaged pickle"),
        (proto(b"K\x01K\x01a"), "a value of type int that is added to"),
        (proto(b"]")[:-1], "a damaged pickle: pickle exhausted"),
        (proto(array(b"K\x01\x85", b"abcd")) + proto(b"]"), "bytes after its end"),
        (b"\xff" * 10, "a damaged pickle"),
        (pickle.dumps([EMBEDDING], 0), "the opcode"),
        (b"\x80\x02" + b"U\x01a.", "the opcode SHORT_BINSTRING 'a'"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[:40],
)  # fmt: skip
def test_hostile_and_damaged_pickles_are_refused(data: bytes, reason: str):
    assert reason in refusal(data)


@pytest.mark.parametrize(
    "end",
    [
        b"\x8c\x01a\x93",
        NDARRAY + b"(K\x01h\x1f\x85" + F4 + b"\x89C\0tb",
        name("numpy", "dtype") + b"h\x1f\x85R",
        name("_codecs", "encode") + text("a") + b"h\x1f\x86R",
    ],
    ids=["name", "shape", "dtype", "encoding"],
)
def test_a_value_that_is_too_large_to_write_out_is_not_written_out(end: bytes):
    # Each list holds the one before it twice: 2 ** 32 lists are in the last.
    doubled = b"".join(b"]\x94h" + bytes([n]) + b"ah" + bytes([n]) + b"a" for n in range(31))
    assert len(refusal(proto(b"]\x94", doubled, end))) < 1000


def test_a_pickle_that_is_cut_short_is_refused_wherever_it_is_cut():
    for protocol in (2, 5):
        data = pickled([EMBEDDING], protocol)
        for length in range(len(data)):
            refusal(data[:length])


def test_a_changed_byte_changes_a_value_or_is_refused():
    data = pickled([{"a": np.ones((1, 2), np.float16)}])
    outcomes = set[bool]()
    for place in range(len(data)):
        for value in (0, ord("R"), ord("."), 0x93, 0xFF):
            try:
                arrays, _ = arrays_in(data[:place] + bytes([value]) + data[place + 1 :])
            except PickleError:
                outcomes.add(False)
            else:
                outcomes.add(True)
                assert sum(array.nbytes for array in arrays.values()) <= len(data)
    assert outcomes == {True, False}
