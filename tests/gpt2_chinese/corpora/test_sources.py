"""Files and archives of corpora: archives are read as streams; harmful, foreign or damaged ones are refused in one line."""

from __future__ import annotations

import gc
import gzip
import io
import os
import stat
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from gpt2_chinese.corpora.sources import input_files, open_sources
from gpt2_chinese.errors import UserError
from tests.limits import peak_bytes

TEXT = "河岸灯会周五开幕。\n".encode()


def read(*inputs: Path, max_bytes: int = 1 << 40) -> dict[str, bytes]:
    """The texts of the inputs by the ends of their names."""
    files, left_out = input_files(list(inputs))
    found = {}
    for source in open_sources(files, lambda count: None, left_out.append, max_bytes):
        pieces = []
        while piece := source.read(1 << 16):
            pieces.append(piece)
        found[source.name.removeprefix(str(inputs[0])).lstrip("/:")] = b"".join(pieces)
    return found | ({"left out": b"%d" % len(left_out)} if left_out else {})


def make_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, members: dict[str, bytes], **fields) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            for field, value in fields.items():
                setattr(header, field, value)
            archive.addfile(header, io.BytesIO(content))
    return path


MEMBERS = {"wiki/1.txt": TEXT, "wiki/2.json": b'["a"]', "wiki/logo.png": b"\x89PNG", "__MACOSX/1.txt": b"x", ".a.txt": b"x"}


def test_all_kinds_give_the_same_texts(tmp_path: Path) -> None:
    expected = {"wiki/1.txt": TEXT, "wiki/2.json": b'["a"]', "left out": b"1"}
    assert read(make_zip(tmp_path / "a.zip", MEMBERS)) == expected
    assert read(make_tar(tmp_path / "a.tar.gz", MEMBERS)) == expected
    assert read(make_tar(tmp_path / "a.tar", MEMBERS)) == expected
    assert read(make_tar(tmp_path / "named.txt", MEMBERS)) == expected, "the content decides the kind, not the name"
    folder = tmp_path / "folder"
    for name, content in MEMBERS.items():
        if "MACOSX" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    assert read(folder) == expected
    (tmp_path / "b.gz").write_bytes(gzip.compress(TEXT) + gzip.compress(TEXT))
    assert read(tmp_path / "b.gz") == {"": TEXT * 2}, "members of a .gz follow each other"
    os.rename(tmp_path / "b.gz", folder / "b.txt.gz")
    assert read(folder)["b.txt.gz"] == TEXT * 2


@pytest.mark.parametrize("name", ["../out.txt", "wiki/../../out.txt", "/etc/out.txt", "..\\out.txt", "C:\\out.txt", ".."])
def test_paths_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    archives = [make_zip(tmp_path / "a.zip", {"a.txt": TEXT, name: TEXT}), make_tar(tmp_path / "a.tar.gz", {name: TEXT})]
    for archive in archives:
        with pytest.raises(UserError, match="is refused: its member .* leads out of the archive"):
            read(archive)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", {"a.txt": b""}, type=kind, linkname="/etc/passwd")
    with pytest.raises(UserError, match="its member 'a.txt' is a link, a device"):
        read(archive)
    link = zipfile.ZipInfo("a.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="its member 'a.txt' is a link"):
        read(tmp_path / "a.zip")


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    zeros = bytes(64 << 20)
    bombs = [make_zip(tmp_path / "a.zip", {"a.txt": zeros}), make_tar(tmp_path / "a.tar.gz", {"a.txt": zeros}),
             tmp_path / "a.gz", make_tar(tmp_path / "b.tar.gz", {"left_out.bin": zeros}),
             make_zip(tmp_path / "b.zip", {f"{i}.txt": zeros[: 4 << 20] for i in range(16)})]  # fmt: skip
    (tmp_path / "a.gz").write_bytes(gzip.compress(zeros))
    for bomb in bombs:
        assert bomb.stat().st_size < 100_000

        def refused(bomb=bomb) -> None:
            with pytest.raises(UserError, match="decompression bomb"):
                files, _ = input_files([bomb])
                for source in open_sources(files, lambda count: None, lambda name: None, 1 << 40):
                    while source.read(1 << 16):
                        pass

        assert peak_bytes(refused) < 4e6, bomb


def test_members_that_share_their_bytes_count_together(tmp_path: Path) -> None:
    """Each member of an overlapping bomb is harmless: here 40 entries of the index lead to the same packed bytes."""
    path = make_zip(tmp_path / "a.zip", {"a.txt": bytes(1 << 20) + os.urandom(20_000)})
    with zipfile.ZipFile(path, "a") as archive:
        member = archive.infolist()[0]
        archive.filelist += [member] * 40
        archive._didModify = True
    with pytest.raises(UserError, match="decompression bomb|Overlapped entries"):
        read(path)


def test_a_limit_of_the_whole_names_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(os.urandom(1 << 20)))
    assert len(read(path)[""]) == 1 << 20
    with pytest.raises(UserError, match="--max-unpacked-gb"):
        read(path, max_bytes=1 << 19)


def test_archives_inside_archives_are_refused(tmp_path: Path) -> None:
    inner = gzip.compress(bytes(1 << 20))
    (tmp_path / "a.gz").write_bytes(gzip.compress(inner))
    make_zip(tmp_path / "a.zip", {"a.gz": inner})
    make_tar(tmp_path / "a.tar", {"a.txt": inner})
    for archive in (tmp_path / "a.gz", tmp_path / "a.zip", tmp_path / "a.tar"):
        with pytest.raises(UserError, match="an archive inside an archive .gzip."):
            read(archive)


@pytest.mark.parametrize("magic, name", [(b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"Rar!\x1a", "rar")])
def test_other_packers_are_named(tmp_path: Path, magic: bytes, name: str) -> None:
    (tmp_path / "a.txt").write_bytes(magic + bytes(600))
    with pytest.raises(UserError, match=f"is packed with {name}"):
        read(tmp_path / "a.txt")


def test_encrypted_and_otherwise_packed_zips_are_named(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.txt": TEXT})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="is encrypted"):
        read(path)
    with pytest.raises(UserError, match="other than deflate"):
        read(make_zip(tmp_path / "b.zip", {"a.txt": TEXT}, zipfile.ZIP_LZMA))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip", "a.gz"])
def test_a_cut_archive_never_passes_for_a_shorter_one(tmp_path: Path, name: str) -> None:
    texts = {f"{i}.txt": os.urandom(700) for i in range(5)}
    path = tmp_path / name
    if name == "a.gz":
        path.write_bytes(gzip.compress(b"".join(texts.values())))
    else:
        (make_zip if name == "a.zip" else make_tar)(path, texts)
    whole = path.read_bytes()
    assert read(path)
    end = 5 * (512 + 1024) if name == "a.tar" else len(whole)  # after it a plain tar holds only padding
    for size in range(1, end, 97 if name != "a.tar" else 256):
        path.write_bytes(whole[:size])
        if size > 300:
            with pytest.raises(UserError, match="damaged or cut short"):
                read(path)


def test_a_flipped_header_of_a_tar_does_not_end_it(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"1.txt": TEXT, "2.txt": TEXT})
    raw = bytearray(path.read_bytes())
    raw[1024] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="damaged or cut short"):
        read(path)


def test_no_tar_ends_early_with_a_python_that_does_not_call_frombuf(tmp_path: Path, monkeypatch) -> None:
    """Patched Pythons do not, e.g. that of Debian 12."""
    parse = tarfile.TarInfo.frombuf.__func__

    def fromtarfile(cls, archive):
        header = parse(cls, archive.fileobj.read(tarfile.BLOCKSIZE), archive.encoding, archive.errors)
        header.offset = archive.fileobj.tell() - tarfile.BLOCKSIZE
        return header._proc_member(archive)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(fromtarfile))
    test_a_flipped_header_of_a_tar_does_not_end_it(tmp_path)


def test_the_checksum_at_the_end_of_a_tar_gz_is_looked_at(tmp_path: Path) -> None:
    raw = make_tar(tmp_path / "a.tar", {"1.txt": TEXT}).read_bytes() + os.urandom(1 << 20)  # tarfile stops before it
    packed = bytearray(gzip.compress(raw))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(packed)
    assert read(path) == {"1.txt": TEXT}
    packed[-8] ^= 1
    path.write_bytes(packed)
    with pytest.raises(UserError, match="damaged or cut short"):
        read(path)


def test_the_headers_of_a_tar_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(UserError, match="a header is too long"):
        read(path)
    long = {"深" * 300 + ".txt": TEXT}
    assert list(read(make_tar(path, long))) == list(long)


def test_many_members_take_no_memory(tmp_path: Path) -> None:
    """No header of an earlier member is kept. (Bytes would count those of other threads and of the first import as well.)"""
    path = make_tar(tmp_path / "a.tar", {f"{i}.txt": b"" for i in range(5000)})
    files, _ = input_files([path])
    for number, _ in enumerate(open_sources(files, lambda count: None, lambda name: None, 1 << 40), 1):
        if number == 4999:
            kept = sum(type(each) is tarfile.TarInfo for each in gc.get_objects())  # isinstance would ask dead proxies
    assert number == 5000 and kept < 10


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(TEXT * 1000)))
    writer.start()
    assert read(pipe) == {"": TEXT * 1000}
    writer.join()
    writer = threading.Thread(target=lambda: pipe.write_bytes(make_zip(tmp_path / "a.zip", {"a.txt": TEXT}).read_bytes()))
    writer.start()
    with pytest.raises(UserError, match="in a pipe"):
        read(pipe)
    writer.join()


def test_missing_and_empty_inputs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        input_files([tmp_path / "nowhere"])
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    with pytest.raises(UserError, match="holds no file to convert: their names must end in .txt"):
        input_files([tmp_path])
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a.txt").write_bytes(TEXT)
    files, left_out = input_files([tmp_path])
    assert [file.name for _, file in files] == ["a.txt"] and len(left_out) == 1, "folders behind links are not entered"
