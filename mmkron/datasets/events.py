"""Read the events of a dynamic vision sensor from three file formats and count them in frames.

A reader decodes a whole file with NumPy. It raises ValueError with the byte offset if the file is damaged, and warns if
times run backwards or pause for more than a minute, with the number and the first three of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmkron.utils.checks import check_choice, check_int, resolve_size

RULES = ('number', 'time')
MOST_FRAMES = 10_000  # otherwise, one wrong time in a file could exhaust the memory
FEW_FRAMES = 100  # more frames require at least one event per frame on average
LONG_PAUSE = 60_000_000  # microseconds

_HEADER_END = b'#!END-HEADER\r\n'
_PACKET_HEADER = np.dtype(
    dict(
        names=['type', 'size', 'overflow', 'capacity', 'number'],
        formats=['<i2', '<i4', '<i4', '<i4', '<i4'],
        offsets=[0, 4, 12, 16, 20],
        itemsize=28,
    )
)
_POLARITY = 1  # the type of packet that holds events of pixels
_NMNIST_MARK = 240  # the y of an overflow mark; the sensor has the rows 0 to 239
_NMNIST_OVERFLOW = 1 << 13  # microseconds


class Events(NamedTuple):
    """Events in the order of their file, each array (N,).

    Attributes:
        t: Time in microseconds, int64.
        x: Column, int16.
        y: Row, int16.
        p: Polarity, 0 or 1, int8.
    """

    t: np.ndarray
    x: np.ndarray
    y: np.ndarray
    p: np.ndarray

    def between(self, start: int, end: int) -> Events:
        """Return the events at times in [start, end), in microseconds."""
        inside = (self.t >= start) & (self.t < end)
        return Events(*(values[inside] for values in self))


def read_aedat2(path: str | os.PathLike) -> Events:
    """Read AEDAT 2.0 of a 128 x 128 sensor (DVS128), as in CIFAR10-DVS.

    After header lines that begin with ``#``, each event is two big-endian 32-bit integers, an address and a signed
    time. The address holds the polarity in bit 0, the sensor's x in bits 1 to 7 and its y in bits 8 to 14. Bit 15 marks
    an external event, which has no pixel: such events are dropped with a warning. As usual for these data, the image
    has ``x = 127 - y`` and ``y = 127 - x``, and the polarity is ``1 - bit 0``. After an overflow of the clock, from
    2^31 - 1 to -2^31, 2^32 is added to all later times.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is empty, has another version, no complete header or an address of more than 16
            bits, or ends within an event.
    """
    data = _read(path)
    _check_version(path, data, '2.0')
    start = 0
    while data[start : start + 1] == b'#':
        end = data.find(b'\n', start)
        if end < 0:
            raise _damage(path, start, 'the file ends within a header line')
        start = end + 1
    if not start:
        raise _damage(path, 0, f"an AEDAT 2.0 file begins with a header line '#...', this one with {data[:8]!r}")
    address, time = _records(path, data, start, np.dtype('>u4'), 2, 'events of 8 bytes').astype(np.uint32).T
    _check_all(path, address < 1 << 16, lambda i: start + 8 * i, 'an address of more than 16 bits', address)
    external = address >> 15 == 1
    _warn(path, external, lambda i: start + 8 * i, 'are external (bit 15) and skipped; addresses', address)
    t = time.view(np.int32).astype(np.int64)
    t += (np.diff(t, prepend=t[:1]) < -(1 << 31)).cumsum() << 32
    kept = np.flatnonzero(~external)
    address, t = address[kept], t[kept]
    _warn_of_times(path, t, lambda i: start + 8 * int(kept[i]))
    return _events(t, 127 - (address >> 8 & 0x7F), 127 - (address >> 1 & 0x7F), 1 - (address & 1))


def read_aedat3(path: str | os.PathLike, size: int | Sequence[int] = 128) -> Events:
    """Read AEDAT 3.1, as in DVS128 Gesture.

    A header that ends with the line ``#!END-HEADER`` is followed by packets. A packet has a header of 28 bytes (the
    type, the bytes per event, the overflows of the clock and the number of events) and the events. An event of a pixel
    (type 1) is two little-endian uint32: the first holds x from bit 17 and y from bit 2 (15 bits each) and the polarity
    in bit 1, the second the lower 31 bits of the time. Packets of other types are skipped. Events that are marked as
    invalid (bit 0) are kept with a warning, as in other readers of these data.

    Args:
        path: The file.
        size: Side of the sensor or (H, W).

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is empty, of another version, has no end of the header or ends within a packet; if an
            event is outside of the sensor or does not have the length and clock of the format; or if the numbers of
            events in a packet's header are negative or differ.
    """
    height, width = resolve_size('size', size)
    data = _read(path)
    _check_version(path, data, '3.1')
    start = data.find(_HEADER_END) + len(_HEADER_END)
    if start < len(_HEADER_END):
        raise _damage(path, 0, f'no line {_HEADER_END!r} ends the header')
    event, clock, bodies, counts, overflows = _read_packets(path, data, start)

    def offset(index: int) -> int:
        packet = int(np.searchsorted(counts.cumsum(), index, 'right'))
        return int(bodies[packet] + 8 * (index - counts[:packet].sum()))

    x, y, p = event >> 17, event >> 2 & 0x7FFF, event >> 1 & 1
    _check_inside(path, x, y, offset, height, width)
    _check_all(path, clock < 1 << 31, lambda i: offset(i) + 4, 'a time of more than 31 bits', clock)
    _warn(path, event & 1 == 0, offset, 'are marked as invalid and counted; first words', event)
    t = np.repeat(overflows << 31, counts) | clock
    _warn_of_times(path, t, offset)
    return _events(t, x, y, p)


def _read_packets(path: str | os.PathLike, data: bytes, start: int) -> tuple[np.ndarray, ...]:
    """Return the two words of all pixel events, and the offset, count and overflows of their packets."""
    words, packets = [np.empty((0, 2), '<u4')], []
    while start < len(data):
        if len(data) - start < _PACKET_HEADER.itemsize:
            raise _damage(path, start, f'the file ends within the header of a packet, after {len(data) - start} bytes')
        kind, bytes_each, overflow, count, number = np.frombuffer(data, _PACKET_HEADER, 1, start)[0].item()
        if min(bytes_each, overflow, count, number) < 0:
            raise _damage(
                path, start, f'a packet of {count} ({number}) events of {bytes_each} bytes, overflow {overflow}'
            )
        body, start = start + _PACKET_HEADER.itemsize, start + _PACKET_HEADER.itemsize + bytes_each * count
        if start > len(data):
            left = len(data) - body
            raise _damage(
                path, body, f'a packet of {count} events of {bytes_each} bytes, of which {left} bytes are there'
            )
        if kind != _POLARITY:
            continue
        if bytes_each != 8:
            raise _damage(path, body, f'an event of a pixel has 8 bytes, an event of this packet has {bytes_each}')
        if number != count:  # writers set both to the number of events
            raise _damage(path, body, f'a packet of {count} events whose header says that it holds {number}')
        words.append(np.frombuffer(data, '<u4', 2 * count, body).reshape(-1, 2))
        packets.append((body, count, overflow))
    return *np.concatenate(words).T, *np.array(packets, np.int64).reshape(-1, 3).T


def read_nmnist(path: str | os.PathLike, size: int | Sequence[int] = 34) -> Events:
    """Read events of 5 bytes of an ATIS sensor, as in N-MNIST and N-Caltech101.

    The first two bytes are x and y. The others, big-endian, hold the polarity in bit 23 and the time in the lower bits.
    An event with y = 240 marks an overflow of the clock and adds 8,192 microseconds to all later times.

    Args:
        path: The file.
        size: Side of the sensor or (H, W), at most (240, 256).

    Raises:
        OSError: If the file cannot be read.
        ValueError: If ``size`` is larger than the format allows, the file is empty or ends within an event, or an event
            is outside of the sensor.
    """
    height, width = resolve_size('size', size)
    if height > _NMNIST_MARK or width > 256:
        raise ValueError(f'size must be at most (240, 256) in the format of N-MNIST, got {size!r}')
    data = _read(path)
    events = _records(path, data, 0, np.dtype('u1'), 5, 'events of 5 bytes').astype(np.int64)
    marks = events[:, 1] == _NMNIST_MARK
    kept = np.flatnonzero(~marks)
    x, y, high, middle, low = events[kept].T
    _check_inside(path, x, y, lambda i: 5 * int(kept[i]), height, width)
    t = ((high & 0x7F) << 16 | middle << 8 | low) + _NMNIST_OVERFLOW * marks.cumsum()[kept]
    _warn_of_times(path, t, lambda i: 5 * int(kept[i]))
    return _events(t, x, y, high >> 7)


def to_frames(
    events: Events,
    size: int | Sequence[int],
    frames: int | None = None,
    by: str = 'number',
    duration: int | None = None,
) -> np.ndarray:
    """Count the events of each polarity at each pixel in consecutive segments.

    With ``frames``, each of M segments has floor(N / M) events for ``by='number'``, or floor((last - first) / M)
    microseconds, but at least 1, for ``by='time'``; the last segment takes the rest. With ``duration``, windows of this
    length begin at the first event; there are as many as needed, and at least one. A segment without events is a frame
    of zeros.

    Args:
        events: N events, in any order of their times.
        size: Side of the sensor or (H, W).
        frames: T, the number of frames.
        by: ``number`` or ``time``. Only with ``frames``.
        duration: Length of a window in microseconds.

    Returns:
        (T, 2, H, W) float32, polarity 0 first.

    Raises:
        TypeError: If a number is not an int, or ``events`` are not :class:`Events` with arrays of integers.
        ValueError: If both or neither of ``frames`` and ``duration`` are given, arrays of ``events`` differ in length,
            a polarity is not 0 or 1, an event is outside of ``size``, or there are more than 10,000 frames, or more
            than 100 frames and fewer events than frames.
    """
    height, width = resolve_size('size', size)
    check_segments(frames, by, duration)
    t, x, y, p = _check_events(events, height, width)
    segment, frames = _assign_segments(t, frames, by, duration)
    cell = ((segment * 2 + p) * height + y) * width + x
    counts = np.bincount(cell, minlength=frames * 2 * height * width)
    return counts.reshape(frames, 2, height, width).astype(np.float32)


def _assign_segments(t: np.ndarray, frames: int | None, by: str, duration: int | None) -> tuple[np.ndarray, int]:
    """Return the segment of each event and the number of segments, for checked arguments of :func:`to_frames`."""
    first, span = (int(t.min()), int(np.ptp(t))) if len(t) else (0, 0)
    most = min(MOST_FRAMES, max(FEW_FRAMES, len(t)))
    if duration is not None:
        frames = span // duration + 1
        if frames > most:
            raise ValueError(
                f'duration must cut {len(t)} events into {most:,} frames at most, got {duration} and times from '
                f'{first} to {first + span}, which are {frames:,} frames'
            )
        return (t - first) // duration, frames
    if frames > most:
        raise ValueError(f'frames must be at most {most:,} for {len(t)} events, got {frames}')
    if by == 'time':
        segment = (t - first) // max(1, span // frames)
    else:
        each = len(t) // frames
        segment = np.arange(len(t)) // each if each else np.full(len(t), frames - 1)
    return np.minimum(segment, frames - 1), frames


def check_segments(frames: int | None, by: str, duration: int | None) -> None:
    """Raise TypeError or ValueError unless :func:`to_frames` accepts the arguments."""
    check_choice('by', by, RULES)
    if (frames is None) == (duration is None):
        raise ValueError(f'frames or duration must be given and the other be None, got {frames!r} and {duration!r}')
    if duration is not None:
        check_int('duration', duration)
        return
    check_int('frames', frames)
    if frames > MOST_FRAMES:
        raise ValueError(f'frames must be at most {MOST_FRAMES:,}, got {frames}')


def _check_events(events: Events, height: int, width: int) -> Events:
    """Return the arrays of ``events`` as int64.

    Raises:
        TypeError, ValueError: See :func:`to_frames`.
    """
    if not isinstance(events, tuple) or len(events) != len(Events._fields):
        raise TypeError(f'events must be Events(t, x, y, p), got {type(events).__name__}')
    for name, values in zip(Events._fields, events):
        if not isinstance(values, np.ndarray) or values.dtype.kind not in 'iub':
            raise TypeError(f'{name} of events must be an array of ints, got {getattr(values, "dtype", type(values))}')
        if values.ndim != 1 or len(values) != len(events[0]):
            raise ValueError(f'{name} of events must have the shape (N,) of t, got {values.shape}, t {events[0].shape}')
    t, x, y, p = (values.astype(np.int64) for values in events)
    if len(t) and not -(1 << 62) < t.min() <= t.max() < 1 << 62:  # differences must not overflow
        raise ValueError(f't of events must be between -2^62 and 2^62, got {t.min()} to {t.max()}')
    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f'events must be inside of size {(height, width)}, got x {x[first]}, y {y[first]} as the first of '
            f'{outside.sum()} events that are not'
        )
    wrong = (p != 0) & (p != 1)
    if wrong.any():
        raise ValueError(
            f'p of events must be 0 or 1, got {p[wrong][0]} as the first of {wrong.sum()} events that are neither; '
            'polarities -1 and 1 become 0 and 1 by (p + 1) // 2'
        )
    return Events(t, x, y, p)


def _damage(path: str | os.PathLike, offset: int, what: str) -> ValueError:
    return ValueError(f'event file {os.fspath(path)!r} is damaged at byte {offset}: {what}')


def _read(path: str | os.PathLike) -> bytes:
    data = Path(path).read_bytes()
    if not data:
        raise _damage(path, 0, 'the file is empty')
    return data


def _check_version(path: str | os.PathLike, data: bytes, version: str) -> None:
    line = data[:64].split(b'\n')[0].rstrip()
    if line.startswith(b'#!AER-DAT') and not line.startswith(b'#!AER-DAT' + version.encode()):
        raise _damage(path, 0, f'AEDAT {version} is expected here, but the file begins with {line!r}')


def _records(path: str | os.PathLike, data: bytes, start: int, dtype: np.dtype, columns: int, what: str) -> np.ndarray:
    """Return the bytes after ``start`` as rows of ``columns`` numbers."""
    row = columns * dtype.itemsize
    rows, rest = divmod(len(data) - start, row)
    if rest:
        raise _damage(path, len(data) - rest, f'{rest} bytes are left after {rows} {what}')
    return np.frombuffer(data, dtype, rows * columns, start).reshape(rows, columns)


def _check_all(
    path: str | os.PathLike, good: np.ndarray, offset: Callable[[int], int], what: str, value: np.ndarray
) -> None:
    if not good.all():
        first = int(good.argmin())
        raise _damage(path, offset(first), f'{what}: {value[first]:#x}, the first of {(~good).sum()} events')


def _check_inside(
    path: str | os.PathLike, x: np.ndarray, y: np.ndarray, offset: Callable[[int], int], height: int, width: int
) -> None:
    inside = (x < width) & (y < height)
    if not inside.all():
        first = int(inside.argmin())
        what = f'an event at x {x[first]}, y {y[first]}, outside of the sensor of {width} x {height} pixels'
        raise _damage(path, offset(first), f'{what}, the first of {(~inside).sum()} events')


def _warn(
    path: str | os.PathLike, found: np.ndarray, offset: Callable[[int], int], what: str, value: np.ndarray
) -> None:
    """Warn of the events that ``found`` marks, with their number and the first three."""
    indices = np.flatnonzero(found)
    if len(indices):
        first = ', '.join(f'{value[i]} at byte {offset(int(i))}' for i in indices[:3])
        more = ', ...' if len(indices) > 3 else ''
        text = f'event file {os.fspath(path)!r}: {len(indices)} of {len(found)} events {what} {first}{more}'
        warnings.warn(text, stacklevel=4)


def _warn_of_times(path: str | os.PathLike, t: np.ndarray, offset: Callable[[int], int]) -> None:
    steps = np.diff(t, prepend=t[:1])
    _warn(path, steps < 0, offset, 'are earlier than the event before them; microseconds', steps)
    _warn(path, steps > LONG_PAUSE, offset, 'come more than 60 s after the event before them; microseconds', steps)


def _events(t: np.ndarray, x: np.ndarray, y: np.ndarray, p: np.ndarray) -> Events:
    return Events(t.astype(np.int64), x.astype(np.int16), y.astype(np.int16), p.astype(np.int8))
