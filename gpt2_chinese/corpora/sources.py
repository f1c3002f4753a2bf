"""Opens a corpus (files, folders, .zip, .gz, .tar.gz, .parquet, .arrow) as streams of bytes, in constant memory.

Nothing is unpacked to disk. The first bytes of an archive decide its type, not its name. One line refuses each of: members
with absolute or `../` paths, links and devices, archives inside archives, encrypted or damaged ones, decompression bombs.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from durable.printable import printable
from gpt2_chinese.corpora import columnar
from gpt2_chinese.errors import UserError

TEXT_SUFFIXES = (".txt", ".text", ".json", ".jsonl", ".ndjson")
ARCHIVE_SUFFIXES = (".gz", ".tgz", ".tar", ".zip")
SUFFIXES = TEXT_SUFFIXES + ARCHIVE_SUFFIXES + columnar.SUFFIXES

# Text shrinks 3 to 10 times; deflate reaches 1032 times. Data that unpacks to more than BOMB_RATIO times is no text.
BOMB_RATIO = 100
BOMB_FLOOR_BYTES = 16 << 20  # a smaller output is no bomb: a short file of one repeated line is harmless
HEADER_BYTES = 1 << 20  # the longest name or extended header of a tar member that is read into memory

_FOREIGN = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_READ_WHOLE = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_DAMAGE = (
    OSError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    ValueError,  # UnicodeError of a member's name included
    LookupError,
    OverflowError,
    RuntimeError,  # an encrypted member
    NotImplementedError,
)


class Source(NamedTuple):
    """One text to read: a file, or a member of an archive.

    Attributes:
        name: its name in messages, such as `corpus.zip:news/1.txt`.
        group: (input, suffix); the format is decided once for all texts of a group.
        alone: False where the input may hold more than one text.
        read: returns at most n bytes, b"" at the end; raises UserError when reading fails.
        table: the file, if it has columns instead of text.
    """

    name: str
    group: tuple[str, str]
    alone: bool
    read: Callable[[int], bytes]
    table: columnar.Table | None = None


def input_files(inputs: list[Path]) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Returns (input, file) for all files of the inputs, folders in order of names, and the names of files left out.

    Raises:
        UserError: an input that does not exist, a folder without a text or an archive.
    """
    files: list[tuple[Path, Path]] = []
    left_out: list[str] = []
    for given in inputs:
        if not given.exists():
            raise UserError(f"{printable(given)} does not exist: give files, folders or archives to convert")
        if not given.is_dir():
            files.append((given, given))
            continue
        before = len(files)
        for folder, folders, names in os.walk(given):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for file in (Path(folder, name) for name in sorted(names)):
                if file.name.startswith(".") or not file.is_file():
                    continue
                if file.suffix.lower() in SUFFIXES and not columnar.belongs_to_datasets(file):
                    files.append((given, file))
                else:
                    left_out.append(printable(file))
        if len(files) == before:
            expected = " ".join(SUFFIXES)
            raise UserError(f"folder {printable(given)} holds no file to convert: their names must end in {expected}")
    return files, left_out


def open_sources(
    files: list[tuple[Path, Path]], progress: Callable[[int], None], leave_out: Callable[[str], None], max_bytes: int
) -> Iterator[Source]:
    """Yields the texts of `files` one after the other; each must be read before the next is requested.

    Args:
        files: what input_files gives.
        progress: called with numbers of bytes that were read from disk.
        leave_out: called with the names of members that are no text.
        max_bytes: what one archive may unpack to at most.

    Raises:
        UserError: a file that cannot be read, an archive that is refused.
    """
    for given, file in files:
        alone = given == file
        name = printable(file)
        try:
            stream = io.BufferedReader(_Counted(file, progress), 1 << 18)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
        with stream:
            first = _guarded(name, stream.peek)(512)
            kind = _kind(first)
            if columns := columnar.kind_of(first, name):
                group = (str(given), file.suffix.lower())
                yield Source(name, group, alone, stream.read, columnar.Table(stream, columns, name))
                progress(max(0, os.fstat(stream.fileno()).st_size - stream.raw.count))  # columns that nobody read
            elif kind == "zip":
                yield from _zip_members(stream, given, name, leave_out, max_bytes)
            elif kind == "gzip":
                yield from _gzip_members(stream, given, name, alone, leave_out, max_bytes)
            elif kind == "tar":
                yield from _tar_members(stream, given, name, leave_out)
            elif kind:
                raise UserError(f"{name} is packed with {kind}, which is not read: unpack it, or pack it as .gz or .zip")
            else:
                yield Source(name, (str(given), file.suffix.lower()), alone, _guarded(name, stream.read))


class _Counted(io.FileIO):
    """A file that counts and reports the bytes read from it."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        super().__init__(path)
        self.count, self._progress = 0, progress

    def readinto(self, buffer) -> int:
        count = super().readinto(buffer) or 0
        self.count += count
        self._progress(count)
        return count


def _kind(first: bytes) -> str:
    """The type of a file by its first bytes: gzip, zip, tar, the name of an unsupported packer, or "" for text."""
    if first.startswith(b"\x1f\x8b"):
        return "gzip"
    if first.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if first[257:262] == b"ustar":
        return "tar"
    return next((kind for magic, kind in _FOREIGN.items() if first.startswith(magic)), "")


def _guarded(name: str, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Wraps `read`: the errors of all libraries become a UserError that names the text."""

    def guarded(size: int) -> bytes:
        try:
            return read(size)
        except _DAMAGE as error:
            raise UserError(_damaged(name, error)) from None

    return guarded


def _damaged(name: str, error: BaseException) -> str:
    return f"{name} is damaged or cut short ({printable(error) or type(error).__name__}): get or pack it again"


def _limited(name: str, read: Callable[[int], bytes], packed: Callable[[], int], max_bytes: int) -> Callable[[int], bytes]:
    """Wraps `read`: raises UserError after far more bytes than were packed, or after more than max_bytes."""
    given = 0

    def limited(size: int) -> bytes:
        nonlocal given
        piece = read(size)
        given += len(piece)
        if given > BOMB_FLOOR_BYTES + BOMB_RATIO * packed():
            raise UserError(f"{name} is refused: it unpacks to over {BOMB_RATIO} times its size (a decompression bomb)")
        if given > max_bytes:
            raise UserError(f"{name} unpacks to more than --max-unpacked-gb {max_bytes / 2**30:g}: raise it if you trust it")
        return piece

    return limited


class _Joined:
    """A stream of bytes that were read ahead, then of the rest."""

    def __init__(self, first: bytes, read: Callable[[int], bytes]) -> None:
        self._first, self._read = first, read

    def read(self, size: int) -> bytes:
        if self._first:
            piece, self._first = self._first[:size], self._first[size:]
            return piece
        return self._read(size)


def _no_nesting(name: str, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Returns a `read` of the same bytes, unless they begin like an archive: then raises UserError."""
    first = read(512)
    if kind := _kind(first):
        raise UserError(f"{name} is an archive inside an archive ({kind}): unpack the outer one first")
    return _Joined(first, read).read


def _check_member(archive: str, member: str) -> None:
    """Refuses names that lead out of a folder; no member is written to disk, but such an archive is made to do harm."""
    parts = re.split(r"[/\\]", member)
    if member.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", member) or ".." in parts or "\0" in member:
        raise UserError(f"{archive} is refused: its member {member!r} has a path that leads out of the archive")


def _wanted(archive: str, member: str, leave_out: Callable[[str], None]) -> bool:
    """True for a text; skips files that systems add (hidden, __MACOSX), and calls leave_out for all others."""
    path = PurePosixPath(member)
    if any(part.startswith(".") or part == "__MACOSX" for part in path.parts):
        return False
    if path.suffix.lower() in TEXT_SUFFIXES + ARCHIVE_SUFFIXES:  # _no_nesting refuses the archives, by name
        return True
    leave_out(f"{archive}:{printable(member)}")
    return False


def _zip_members(stream: BinaryIO, given: Path, name: str, leave_out, max_bytes: int) -> Iterator[Source]:
    if not stream.seekable():
        raise UserError(f"{name} is a zip archive in a pipe: give the file itself")
    try:
        archive = zipfile.ZipFile(stream)
        members = archive.infolist()
    except _DAMAGE as error:
        raise UserError(_damaged(name, error)) from None
    for member in members:
        _check_member(name, member.filename)
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{name} is refused: its member {member.filename!r} is a link")
        if member.flag_bits & 1:
            raise UserError(f"{name} is encrypted: unpack it with its password first")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{name} is packed by a method other than deflate: pack it again")
    size = os.fstat(stream.fileno()).st_size
    current: BinaryIO | None = None
    # one count for all members: in a bomb they may share the same packed bytes, and each looks harmless alone
    limited = _limited(name, lambda count: current.read(count), lambda: size, max_bytes)
    for member in members:
        if member.is_dir() or not _wanted(name, member.filename, leave_out):
            continue
        inside = f"{name}:{printable(member.filename)}"
        try:
            current = archive.open(member)
        except _DAMAGE as error:
            raise UserError(_damaged(inside, error)) from None
        with current:
            group = (str(given), PurePosixPath(member.filename).suffix.lower())
            yield Source(inside, group, len(members) == 1, _no_nesting(inside, _guarded(inside, limited)))


def _gzip_members(
    stream: io.BufferedReader, given: Path, name: str, alone: bool, leave_out, max_bytes: int
) -> Iterator[Source]:
    """One text, or the members of a .tar.gz."""
    unpacked = gzip.GzipFile(fileobj=stream)
    read = _limited(name, _guarded(name, unpacked.read), lambda: stream.raw.count, max_bytes)
    first = read(512)
    if _kind(first) == "tar":
        yield from _tar_members(_Joined(first, read), given, name, leave_out)
        while read(1 << 16):  # read to the end, so that gzip verifies its checksum
            pass
        return
    suffix = PurePosixPath(PurePosixPath(name).stem).suffix.lower()
    yield Source(name, (str(given), suffix), alone, _no_nesting(name, _Joined(first, read).read))


class _Header(tarfile.TarInfo):
    """A tar header that raises when it is damaged or missing; tarfile would silently end the archive there."""

    @classmethod
    def fromtarfile(cls, archive):  # patched Pythons do not call frombuf
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None

    def _proc_member(self, archive):
        # tarfile reads extended headers whole, whatever size they claim
        if self.type in _READ_WHOLE and self.size > HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        return super()._proc_member(archive)


def _tar_members(stream, given: Path, name: str, leave_out) -> Iterator[Source]:
    try:
        archive = tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header, bufsize=1 << 16)  # noqa: SIM115
    except _DAMAGE as error:
        raise UserError(_damaged(name, error)) from None
    while True:
        try:
            member = archive.next()
        except _DAMAGE as error:
            raise UserError(_damaged(name, error)) from None
        if member is None:
            return
        archive.members = []  # else tarfile keeps the header of every member
        _check_member(name, member.name)
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise UserError(f"{name} is refused: its member {member.name!r} is a link, a device or a sparse file")
        if not _wanted(name, member.name, leave_out):
            continue
        inside = f"{name}:{printable(member.name)}"
        group = (str(given), PurePosixPath(member.name).suffix.lower())
        yield Source(inside, group, False, _no_nesting(inside, _guarded(inside, archive.extractfile(member).read)))
