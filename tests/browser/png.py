"""PNG files made small: a screenshot has few colours, and a palette of 256 shows all that is to be seen."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = 256


def with_palette(png: bytes) -> bytes:
    """The picture (8 bits of RGB or RGBA, all opaque) with a palette of its most frequent colours."""
    chunks = list(_chunks(png))
    width, height, depth, kind = struct.unpack(">2I2B", chunks[0][1][:10])
    assert (depth, kind in (2, 6)) == (8, True), (depth, kind)
    pixel = 3 if kind == 2 else 4
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    lines = []
    for line in _lines(data, width * pixel, pixel):
        colours = zip(line[0::pixel], line[1::pixel], line[2::pixel])
        lines.append(list(colours))
    counts = Counter(colour for line in lines for colour in line)
    palette = [colour for colour, _ in counts.most_common(_COLOURS)]
    index = {colour: _nearest(colour, palette) for colour in counts}
    body = b"".join(b"\0" + bytes(index[colour] for colour in line) for line in lines)
    head = struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", bytes(one for colour in palette for one in colour)))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (*parts, (b"IDAT", zlib.compress(body, 9)), (b"IEND", b""))
    )


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(_SIGNATURE)
    width, height = struct.unpack(">2I", png[16:24])
    return width, height


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(_SIGNATURE)
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length


def _lines(data: bytes, length: int, pixel: int) -> Iterator[bytearray]:
    """The lines without their filters (PNG, 9.2)."""
    before = bytearray(length)
    for place in range(0, len(data), length + 1):
        kind, line = data[place], bytearray(data[place + 1 : place + 1 + length])
        for at in range(length if kind else 0):
            left = line[at - pixel] if at >= pixel else 0
            above = before[at]
            corner = before[at - pixel] if at >= pixel else 0
            guess = (0, left, above, (left + above) // 2, 0)[kind]
            if kind == 4:
                guess = min((left, above, corner), key=lambda one: abs(left + above - corner - one))
            line[at] = (line[at] + guess) & 255
        yield line
        before = line


def _nearest(colour: tuple[int, ...], palette: Sequence[tuple[int, ...]]) -> int:
    distances = (sum((a - b) ** 2 for a, b in zip(colour, one)) for one in palette)
    return min(enumerate(distances), key=lambda one: one[1])[0]
