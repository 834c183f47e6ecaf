"""Text files of labeled sets: plain or compressed, in any encoding."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.common.files import reject_lfs_pointer

_SPREADSHEETS = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def plain_suffix(path: Path) -> str:
    """Return the suffix in lower case, ignoring a compression suffix: `.json` of `a.JSON.gz`."""
    return (Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix).lower()


def plain_stem(path: Path) -> str:
    """Return the name without suffixes: `a` of `a.json.gz`."""
    return Path(path.stem).stem if path.suffix in _COMPRESSED else path.stem


def reject_spreadsheet(path: Path) -> None:
    """Raise `InputError` if the file has the suffix of a spreadsheet."""
    if path.suffix.lower() in _SPREADSHEETS:
        raise InputError(f"{path}: spreadsheets are not supported. Save it as CSV UTF-8 in Excel (File, Save As).")


def is_encoding(name: str) -> bool:
    """Return whether `name` is one of Python's text encodings, unlike codecs such as rot13 and base64."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=name)
    except (LookupError, ValueError):
        return False
    return True


def read_text(path: Path, encoding: str = "utf-8", advice: str = "") -> str:
    """Read a whole text file (.gz, .bz2 and .xz are decompressed), without its byte-order mark.

    Args:
        encoding: name of a Python text encoding; with utf-8, a file with a byte-order mark of UTF-16 is read as UTF-16.
        advice: appended to the error about bytes that are not in the encoding.

    Raises:
        InputError: the file is missing, damaged, or not in this encoding.
    """
    if not path.is_file():
        raise InputError(f"{path}: {'a folder, not a file' if path.is_dir() else 'not found'}. Check the path.")
    reject_lfs_pointer(path)
    reject_spreadsheet(path)
    try:
        with _COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            raw: bytes = file.read()  # pyright: ignore[reportAssignmentType]
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be read ({reason}). Fetch it again, or check its permissions.") from None
    if codecs.lookup(encoding).name == "utf-8" and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"  # UTF-8 cannot start with these bytes
    bom = codecs.BOM_UTF8 if codecs.lookup(encoding).name == "utf-8" and raw.startswith(codecs.BOM_UTF8) else b""
    try:
        return raw[len(bom) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(bom) + error.start
        line = raw.count(b"\n", 0, at) + 1
        raise InputError(
            f"{path}:{line}: byte {at} (0x{raw[at]:02x}) is not {encoding.upper()}. Save the file as UTF-8{advice}."
        ) from None
    except UnicodeError as error:  # from codecs that report no position, such as punycode
        raise InputError(f"{path}: not {encoding.upper()} ({error}). Save the file as UTF-8{advice}.") from None
