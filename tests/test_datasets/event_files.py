"""Writers of the three byte formats of events, one event after another, and random events."""

import struct

import numpy as np


def random_events(rng, count, side=128, end=1000):
    """Return ``count`` events (t, x, y, p) in order of time, with t below ``end``."""
    columns = [np.sort(rng.integers(0, end, count)), *rng.integers(0, side, (2, count)), rng.integers(0, 2, count)]
    return list(zip(*(column.tolist() for column in columns)))


def aedat2(events, header=b'#!AER-DAT2.0\r\n# a line\r\n'):
    """Return AEDAT 2.0 of a 128 x 128 sensor, which flips x, y and the polarity; t is below 2^31."""
    body = b''
    for t, x, y, p in events:
        body += struct.pack('>Ii', (127 - x) << 8 | (127 - y) << 1 | (1 - p), t)
    return header + body


def packet3(events, overflow=0, kind=1, size=8, capacity=None, number=None):
    """Return a packet of AEDAT 3.1; t is below 2^31."""
    capacity = len(events) if capacity is None else capacity
    number = capacity if number is None else number
    head = struct.pack('<HHiiiiii', kind, 1, size, 4, overflow, capacity, number, number)
    return head + b''.join(struct.pack('<II', x << 17 | y << 2 | p << 1 | 1, t) for t, x, y, p in events)


def aedat3(*packets):
    """Return a file of AEDAT 3.1."""
    return b'#!AER-DAT3.1\r\n#Format: RAW\r\n#!END-HEADER\r\n' + b''.join(packets)


def nmnist(events):
    """Return a file in the format of N-MNIST."""
    return b''.join(bytes([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255]) for t, x, y, p in events)
