"""Which encodings a file can have that is read by lines, from any line on."""

from __future__ import annotations

import codecs
from typing import Final

BOM: Final = codecs.BOM_UTF8

#: How codecs call those whose bytes mean something else after others that came lines before.
_STATEFUL: Final = ("utf-7", "iso2022", "hz", "punycode", "idna")


def line_encoding(encoding: str) -> str:
    """Its name to decode lines with: UTF-8 without its mark, which is taken off the file.

    Raises ValueError for an encoding in which lines cannot be found, LookupError for one that is
    unknown or not of text.
    """
    if not isinstance(encoding, str):
        raise TypeError(f"encoding must be a str, not {type(encoding).__name__}")
    name = codecs.lookup(encoding).name
    if name in ("utf-8", "utf-8-sig"):
        return "utf-8"
    if name.startswith(_STATEFUL):
        raise _refused(encoding, "what its bytes mean depends on those before them")
    if "\n".encode(name) != b"\n":
        raise _refused(encoding, "its line end is not the single byte 0x0A")
    return name


def _refused(encoding: str, reason: str) -> ValueError:
    return ValueError(
        f"a file in {encoding} cannot be read on from a line: {reason}. "
        "Convert it to UTF-8 first, for instance with iconv"
    )
