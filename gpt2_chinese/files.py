"""Reads files that a user names, and checks whether output could be written where a user wants it.

Whatever the path leads to, a call ends at once: with a value, or with a UserError of one line.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from durable.printable import utf8
from gpt2_chinese.errors import UserError

LONGEST_NAME = 240  # bytes; Linux allows 255, and staging files have longer names
LARGEST_TEXT = 1 << 28  # bytes of a vocabulary or a configuration; a larger file is weights or a corpus


def kind(path: Path | str, what: str) -> str:
    """"file", "folder" or "missing"; links are followed.

    Args:
        path: any text.
        what: the kind of file and its path, for the message: `vocabulary x.txt`.

    Raises:
        UserError: a path that cannot be inspected (permission, a circle of links, too long), or that leads to a pipe or a
            device, which may have no end.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {what}: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise UserError(f"cannot read {what}: it is a pipe or a device; write what it gives to a file first")
    return "file"


def reason(error: OSError | ValueError) -> str:
    """The system's message about a path, without the path."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "no path can hold a null character"


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file, its byte order mark left out, its line ends as they are.

    Raises:
        UserError: missing, no plain file, unreadable, too large, or not UTF-8.
    """
    found = kind(path, what)
    if found != "file":
        raise UserError(f"cannot read {what}: " + ("it does not exist" if found == "missing" else "it is a folder"))
    try:
        with open(path, "rb") as stream:
            content = stream.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise UserError(f"cannot read {what}: {reason(error)}") from None
    if len(content) > LARGEST_TEXT:
        raise UserError(f"cannot read {what}: it is larger than {LARGEST_TEXT >> 20} MiB, which is no text of this kind")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"cannot read {what}: it is not UTF-8 text; save it as UTF-8, or give another file") from None


def read_json(path: Path, what: str) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: as `read_text`, or no valid JSON.
    """
    text = read_text(path, what)
    try:
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError(f"cannot read {what}: its JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise UserError(f"cannot read {what}: it has a \\ud800 to \\udfff alone, which is half a character") from None
    except ValueError as error:
        hint = "; JSON has no comments" if "//" in text or "/*" in text else ""
        raise UserError(f"cannot read {what}: not valid JSON: {error}{hint}") from None
    return content


def check_output_folder(folder: Path | str, flag: str = "--output-dir", shown: Path | str | None = None) -> None:
    """Raises UserError, which names the flag, when nothing could be written below `folder`; leaves nothing behind.

    A folder is made and removed in the deepest one that exists: permissions do not tell it all. /proc lets root write and
    has no room for a file, and a disk may be read-only or full. `shown` is the path that the user gave, if another one.
    """
    what = f"{flag} {folder if shown is None else shown} cannot be written"
    existing = Path(folder).absolute()
    if utf8(str(existing)) != str(existing):
        raise UserError(f"{what}: its name is not UTF-8, and not every library can write there; give another one")
    try:
        while True:
            try:
                existing.stat()
                break
            except FileNotFoundError:
                if existing.is_symlink():
                    raise UserError(f"{what}: {existing} is a link to nothing") from None
                existing = existing.parent
    except (OSError, ValueError) as error:  # a file among its parents, a circle of links, too long a name
        raise UserError(f"{what}: {reason(error)}") from None
    if not existing.is_dir():
        raise UserError(f"{what}: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{what}: no permission for {existing}")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".tried", dir=existing))
    except OSError as error:
        raise UserError(
            f"{what}: no folder can be made in {existing} ({reason(error)}); give another one"
        ) from None


def check_output_file(file: Path | str, flag: str, in_new_folder: bool = False) -> None:
    """Raises UserError, which names the flag, when the file could not be written; leaves nothing behind.

    Args:
        file: the file.
        flag: the flag that names it.
        in_new_folder: the program makes the file's folder. If False, the folder must exist.
    """
    path = Path(file)
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise UserError(f"{flag} {file} cannot be written: File name too long")
    try:
        is_folder, there = os.path.isdir(path), os.path.isdir(path.absolute().parent)
        os.lstat(path.absolute().parent)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {file} cannot be written: {reason(error)}") from None
    if is_folder:
        raise UserError(f"{flag} {file} cannot be written: it is a folder, give a file")
    if not there and not in_new_folder:
        raise UserError(f"{flag} {file} cannot be written: give a file in a folder that exists")
    check_output_folder(path.absolute().parent, flag, shown=file)


def display(path: Path) -> Path:
    """A path as the user would type it: relative to the working directory when it is below it."""
    path, here = Path(path).resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
