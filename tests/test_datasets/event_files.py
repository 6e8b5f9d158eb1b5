"""Writers of the three byte formats of events, one event after another: the readers' counterpart in other terms."""

import struct


def aedat2(events, header=b'#!AER-DAT2.0\r\n# a line\r\n'):
    """Events (t, x, y, p) of a 128 x 128 sensor, t below 2^31: the image is turned back, the polarity too."""
    body = b''
    for t, x, y, p in events:
        body += struct.pack('>Ii', (127 - x) << 8 | (127 - y) << 1 | (1 - p), t)
    return header + body


def packet3(events, overflow=0, kind=1, size=8, capacity=None, number=None):
    """A packet of AEDAT 3.1; events (t, x, y, p) with t below 2^31."""
    capacity = len(events) if capacity is None else capacity
    number = capacity if number is None else number
    head = struct.pack('<HHiiiiii', kind, 1, size, 4, overflow, capacity, number, number)
    return head + b''.join(struct.pack('<II', x << 17 | y << 2 | p << 1 | 1, t) for t, x, y, p in events)


def aedat3(*packets):
    return b'#!AER-DAT3.1\r\n#Format: RAW\r\n#!END-HEADER\r\n' + b''.join(packets)


def nmnist(events):
    return b''.join(bytes([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255]) for t, x, y, p in events)
