"""Tars of others: the files that tar programs write are found, and what could harm is refused."""

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webdataset.writer import ShardWriter

from cosmos_rl_core.storage import tars
from tests.tar_files import made

LONG = "/".join(["a folder with a long name"] * 8) + "/ü.txt"


def contents(data: bytes) -> dict[str, bytes]:
    return {name: data[start : start + size] for name, start, size in tars.files(io.BytesIO(data))}


def one(name: str = "0.txt", data: bytes = b"text", **fields: Any) -> bytes:
    return made((name, data, fields))


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_every_format_are_found(format: int):
    names = ["0.txt", "0.png", "folder/1.txt", *([] if format == tarfile.USTAR_FORMAT else [LONG])]
    files = {name: name.encode() * 40 for name in names}
    data = made(*((name, data, {"mtime": 1.5}) for name, data in files.items()), format=format)
    assert contents(data) == files


@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7", "oldgnu"])
def test_gnu_tars_are_read(format: str, tmp_path: Path):
    names = ["0.txt", "folder/1.txt", *([LONG] if format in ("gnu", "posix", "oldgnu") else [])]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name, encoding="utf-8")
    subprocess.run(["tar", f"--format={format}", "-cf", tmp_path / "0.tar", "-C", tmp_path / "in", "."], check=True)
    assert contents((tmp_path / "0.tar").read_bytes()) == {name: name.encode() for name in names}


def test_webdatasets_shards_are_read(tmp_path: Path):
    with ShardWriter(str(tmp_path / "%02d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(3):
            writer.write({"__key__": f"{number:04d}", "txt": f"text {number}", "bin": b"\0" * number})
    found = [contents((tmp_path / f"{shard:02d}.tar").read_bytes()) for shard in range(2)]
    assert [[*files] for files in found] == [["0000.bin", "0000.txt", "0001.bin", "0001.txt"], ["0002.bin", "0002.txt"]]
    assert found[1] == {"0002.txt": b"text 2", "0002.bin": b"\0\0"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/0.txt", "leads out of the folder"),
        ("../0.txt", "leads out of the folder"),
        ("a/../../0.txt", "leads out of the folder"),
        ("..\\0.txt", "leads out of the folder"),
        ("a\n0.txt", "printable"),
        ("\x1b[2J0.txt", "printable"),
        ("a" * 2000, "expected at most 1024"),
    ],
)
def test_names_that_could_harm_are_refused(name: str, reason: str):
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with pytest.raises(tars.TarError, match=reason):
            contents(made((name, b"", {}), format=format))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.CONTTYPE, "of the unknown type b'7'"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"V", "of the unknown type b'V'"),
    ],
)
def test_tars_with_anything_but_files_and_folders_are_refused(kind: bytes, what: str):
    with pytest.raises(tars.TarError, match=f"'0.txt' is {what}, expected files and folders"):
        contents(one(data=b"", type=kind, linkname="/etc/passwd"))


@pytest.mark.parametrize("again", ["0.txt", "./0.txt", ".//0.txt"])
def test_a_name_that_comes_twice_is_refused(again: str):
    with pytest.raises(tars.TarError, match=r"'0\.txt' comes twice"):
        contents(made(("0.txt", b"a", {}), (again, b"b", {})))


def test_a_tar_that_is_cut_short_is_refused_wherever_it_is_cut():
    whole = made(("0.txt", b"a" * 600, {}), ("1.txt", b"b", {}))
    assert len(contents(whole[: 5 * 512 + 512])) == 2
    for length in range(0, 5 * 512 + 512, 128):
        with pytest.raises(tars.TarError, match="cut short"):
            contents(whole[:length])


@pytest.mark.parametrize("size", [10**6, 2**40, 2**62])
def test_a_giant_size_is_refused_before_anything_is_read(size: int):
    header = tarfile.TarInfo("0.txt")
    header.size = size
    with pytest.raises(tars.TarError, match=f"has {size} bytes, of which 1024 are there"):
        contents(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_a_size_below_zero_does_not_lead_back():
    block = bytearray(one()[:1024] + bytes(1024))
    block[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024, which leads back to this header
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block[:512]):06o}\0 ".encode()
    with pytest.raises(tars.TarError, match="has -1024 bytes"):
        contents(bytes(block))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_giant_header_is_not_read(kind: bytes):
    with pytest.raises(tars.TarError, match="a header of 100000 bytes, at most 65536 are read"):
        contents(one(data=bytes(100_000), type=kind))


def test_many_headers_before_a_file_are_read_one_after_the_other():
    records = [("x", b"12 comment=\n", {"type": tarfile.XHDTYPE})]
    assert contents(made(*records * 3000, ("0.txt", b"a", {}))) == {"0.txt": b"a"}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (b"9999 path=a\n", "a damaged pax header"),
        (b"0 path=a\n", "a damaged pax header"),
        (b"-9 path=a\n", "a damaged pax header"),
        (b"path=a", "a damaged pax header"),
        (b"11 path=\xff\xfe\n", "a name is not UTF-8"),
        (b"20 path=../../a.txt\n", "leads out of the folder"),
        (b"11 size=-1\n", "a size of '-1'"),
        (b"22 GNU.sparse.major=1\n", "sparse"),
    ],
)
def test_damaged_records_are_refused(records: bytes, reason: str):
    with pytest.raises(tars.TarError, match=reason):
        contents(made(("x", records, {"type": tarfile.XHDTYPE}), ("0.txt", b"a", {})))


def test_a_size_of_a_folder_does_not_count_for_the_file_after_it():
    folder = ("folder", b"", {"type": tarfile.DIRTYPE})
    records = ("x", b"12 size=512\n", {"type": tarfile.XHDTYPE})
    assert contents(made(records, folder, ("0.txt", b"a", {}))) == {"0.txt": b"a"}


def test_one_name_for_all_files_is_refused():
    with pytest.raises(tars.TarError, match="a header gives all files one path"):
        contents(made(("x", b"10 path=a\n", {"type": tarfile.XGLTYPE}), ("0.txt", b"a", {})))


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_not_unpacked(mode: Any):
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode=mode).close()
    with pytest.raises(tars.TarError, match="it is compressed; unpack it"):
        contents(buffer.getvalue())


@pytest.mark.parametrize("change", [lambda d: b"\1" + d[1:], lambda d: b"x" * len(d), lambda d: d[:100] + d[200:]])
def test_a_damaged_header_is_not_taken_for_the_end(change: Callable[[bytes], bytes]):
    first = one("0.txt", b"a")[:1024]
    with pytest.raises(tars.TarError, match=r"no header of a file|cut short|not UTF-8"):
        contents(first + change(one("1.txt", b"b")))
