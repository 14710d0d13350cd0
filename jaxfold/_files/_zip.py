"""Writing a zip archive of which most members come compressed, or not, from another one.

``zipfile`` can only decompress a member and compress it again. What it takes to pass one on as it lies is little: each
member is a header, its name and its data, and a directory with the same again stands at the end. Sizes and offsets of
4 GiB and more go into an extra field, and into a second end of the directory.

Source: .ZIP File Format Specification (APPNOTE), sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import NamedTuple

from jaxfold._files._copy import Writer
from jaxfold._files._leaf import Span

BIG = 0xFFFFFFFF  # what stands in place of a number that needs eight bytes
LIMIT = BIG  # from which on a number does
MANY = 0xFFFF
LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END_BIG, LOCATOR = b"PK\6\6", b"PK\6\7"
SIZES_FOLLOW, UTF8 = 0x08, 0x800  # flags
VERSION, VERSION_BIG = 20, 45


class Member(NamedTuple):
    """A member of an archive: its entry in the directory, and where its data lies as stored."""

    info: zipfile.ZipInfo
    span: Span


class Entry(NamedTuple):
    """What the directory says of a member."""

    info: zipfile.ZipInfo
    name: bytes
    flags: int
    offset: int


class Archive:
    """An archive under construction."""

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._entries: list[Entry] = []

    def copy(self, member: Member) -> None:
        """Adds a member of another archive as it is."""
        self._start(member.info)
        self._file.copy(member.span)

    def add(self, name: str, parts: tuple[bytes | memoryview, ...], *, compress: bool) -> None:
        """Adds a member made of parts in memory."""
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o600 << 16  # as zipfile has it
        info.file_size = sum(len(part) for part in parts)
        info.CRC = 0
        for part in parts:
            info.CRC = zlib.crc32(part, info.CRC)
        if compress:
            info.compress_type = zipfile.ZIP_DEFLATED
            compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            parts = (*(compressor.compress(part) for part in parts), compressor.flush())
        info.compress_size = sum(len(part) for part in parts)
        self._start(info)
        for part in parts:
            self._file.write(part)

    def finish(self) -> None:
        """Writes the directory."""
        start = self._file.position
        for entry in self._entries:
            self._file.write(_central(entry))
        size, count = self._file.position - start, len(self._entries)
        if count >= MANY or start >= LIMIT or size >= LIMIT:
            self._file.write(
                struct.pack("<4sQ2H2L4Q", END_BIG, 44, VERSION_BIG, VERSION_BIG, 0, 0, count, count, size, start)
            )
            self._file.write(struct.pack("<4sLQL", LOCATOR, 0, start + size, 1))
        count, size, start = min(count, MANY), _short(size), _short(start)
        self._file.write(struct.pack("<4s4H2LH", END, 0, 0, count, count, size, start, 0))

    def _start(self, info: zipfile.ZipInfo) -> None:
        flags = info.flag_bits & ~(SIZES_FOLLOW | UTF8)  # the sizes are known, and stand in the header
        try:
            name = info.filename.encode("ascii")
        except UnicodeEncodeError:
            name, flags = info.filename.encode(), flags | UTF8
        entry = Entry(info, name, flags, self._file.position)
        self._entries.append(entry)
        sizes = (info.file_size, info.compress_size)
        extra = struct.pack("<2H2Q", 1, 16, *sizes) if max(sizes) >= LIMIT else b""
        shown = (BIG, BIG) if extra else (info.compress_size, info.file_size)
        head = struct.pack("<4sH", LOCAL, VERSION_BIG if extra else max(VERSION, info.extract_version))
        self._file.write(head + _common(entry) + struct.pack("<2L2H", *shown, len(name), len(extra)) + name + extra)


def _common(entry: Entry) -> bytes:
    """What a member's header and its entry in the directory share, from the flags to the checksum."""
    info = entry.info
    year, month, day, hour, minute, second = info.date_time
    date, time = (year - 1980) << 9 | month << 5 | day, hour << 11 | minute << 5 | second // 2
    return struct.pack("<4HL", entry.flags, info.compress_type, time, date, info.CRC)


def _central(entry: Entry) -> bytes:
    info = entry.info
    numbers = (info.file_size, info.compress_size, entry.offset)
    big = [number for number in numbers if number >= LIMIT]
    extra = struct.pack(f"<2H{len(big)}Q", 1, 8 * len(big), *big) if big else b""
    size, compressed, offset = map(_short, numbers)
    version = VERSION_BIG if big else max(VERSION, info.extract_version)
    head = struct.pack("<4s2BH", CENTRAL, version, info.create_system, version)
    lengths = struct.pack("<2L5H2L", compressed, size, len(entry.name), len(extra), 0, 0, 0, info.external_attr, offset)
    return head + _common(entry) + lengths + entry.name + extra


def _short(number: int) -> int:
    """The number in four bytes, or what says that it stands elsewhere."""
    return BIG if number >= LIMIT else number
