"""Where torch's pickled files keep the numbers of their tensors: records of a zip archive, or the end of an old file.

torch.save writes a zip archive with the pickle in data.pkl and the numbers of each storage in a record of its own,
as they are. Before version 1.6 it wrote several pickles one after the other and the numbers behind them.
Neither is copied here: the file is mapped into memory, and a record is a range of its bytes.
"""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ARCHIVE, PICKLE = b"PK\x03\x04", b"\x80"  # how the two kinds of files begin
INDEX_BYTES = 1 << 24  # of data.pkl, and of the archive's table of records: 250 bytes a tensor are usual
LOCAL_HEADER = 30  # bytes before the name of a record


@dataclass(frozen=True)
class Span:
    """A range of bytes of a file."""

    start: int
    length: int


class Bounded(io.FileIO):
    """A file of which no large piece is read at once: `zipfile` reads the table of records in one piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; ValueError for more than `INDEX_BYTES`."""
        size = os.fstat(self.fileno()).st_size - self.tell() if size is None or size < 0 else size
        if size > INDEX_BYTES:
            raise ValueError(f"has a table of records of {size} bytes, expected at most {INDEX_BYTES}")
        return super().read(size) or b""


def mapped(path: Path) -> mmap.mmap:
    """Return the bytes of a file; ValueError if it is empty."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it; never written


def records(path: Path, data: mmap.mmap) -> tuple[Span, Mapping[str, Span]]:
    """Return where the pickle of an archive lies, and where the numbers of each storage do, by its key.

    Raises ValueError for an archive that torch does not write, such as one that grows when it is read.
    """
    with Bounded(path) as file, zipfile.ZipFile(file) as archive:
        found = archive.infolist()
    index = [record for record in found if record.filename.endswith("/data.pkl") and record.filename.count("/") == 1]
    if len(index) != 1:
        raise ValueError(f"has {len(index)} records data.pkl, expected one")
    folder = index[0].filename.removesuffix("data.pkl")
    for record in found:
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise ValueError(f"has the compressed record {record.filename!a:.200}, which torch never writes")
    if index[0].file_size > INDEX_BYTES:
        raise ValueError(f"has an index of {index[0].file_size} bytes, expected at most {INDEX_BYTES}")
    spans = {record.filename.removeprefix(folder): _span(record, data) for record in found}
    order = spans.get("byteorder")
    if order is not None and data[order.start : order.start + min(order.length, 6)] != b"little":
        raise ValueError("has big-endian numbers, expected little-endian ones")
    storages = {name.removeprefix("data/"): span for name, span in spans.items() if name.startswith("data/")}
    return spans["data.pkl"], storages


def _span(record: zipfile.ZipInfo, data: mmap.mmap) -> Span:
    """Return where the bytes of a record lie: behind its own header, whose length the table does not say."""
    header = data[record.header_offset : record.header_offset + LOCAL_HEADER]
    lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # of its name and of what follows
    start = record.header_offset + LOCAL_HEADER + sum(lengths)
    if header[:4] != ARCHIVE or record.header_offset < 0 or start + record.file_size > len(data):
        raise ValueError(f"has the record {record.filename!a:.200} beyond its end")
    return Span(start, record.file_size)
