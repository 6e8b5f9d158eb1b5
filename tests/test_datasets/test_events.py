"""Events: files in the three byte formats, damaged files, and frames against plain loops."""

import struct
import warnings

import numpy as np
import pytest
from event_files import aedat2, aedat3, nmnist, packet3, random_events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkron.datasets.events import Events, read_aedat2, read_aedat3, read_nmnist, to_frames
from support.errors import raises

# Random times decrease, of which the readers warn; the tests of these warnings catch them.
pytestmark = pytest.mark.filterwarnings('ignore:event file .* of .* events:UserWarning')

FUNCTION_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
RULES = (dict(frames=5), dict(frames=5, by='time'), dict(duration=70))


def event_lists(side, bits, first=0):
    coordinate = st.integers(0, side - 1)
    return st.lists(st.tuples(st.integers(first, 2**bits - 1), coordinate, coordinate, st.integers(0, 1)), max_size=20)


def put(folder, data, name='events.bin'):
    path = folder / name
    path.write_bytes(data)
    return path


def rows(events):
    assert [values.dtype for values in events] == [np.int64, np.int16, np.int16, np.int8]
    return list(zip(*(values.tolist() for values in events)))


def make_events(rng, count, side=8, span=1000):
    return make_types(*zip(*random_events(rng, count, side, span))) if count else make_types([], [], [], [])


def make_types(t, x, y, p):
    return Events(np.array(t, np.int64), np.array(x, np.int16), np.array(y, np.int16), np.array(p, np.int8))


@FUNCTION_FIXTURE
@given(events=event_lists(128, 31, -(2**31)))
def test_aedat2(tmp_path, events):
    """Times are signed; the clock overflows where it decreases by more than half of its range."""
    expected, laps = [], 0
    for i, (t, *event) in enumerate(events):
        laps += i > 0 and t - events[i - 1][0] < -(2**31)
        expected.append((t + laps * 2**32, *event))
    assert rows(read_aedat2(put(tmp_path, aedat2(events)))) == expected


def test_aedat2_in_bytes(tmp_path):
    """The two events have the sensor's y 0x11, x 0x3d and polarity bit 1; one is 2 us before time 0."""
    event = bytes([0, 0, 0x11, 0x3D << 1 | 1])
    data = b'#!AER-DAT2.0\r\n' + event + b'\xff\xff\xff\xfe' + event + bytes([0, 1, 0, 2])
    place = (127 - 0x11, 127 - 0x3D, 0)
    assert rows(read_aedat2(put(tmp_path, data))) == [(-2, *place), (0x10002, *place)]


def test_aedat2_external_events(tmp_path):
    """Bit 15 of the address marks events that are not of a pixel; they are dropped with a warning."""
    data = aedat2([(1, 2, 3, 0)]) + struct.pack('>Ii', 0x8000, 2) * 4 + aedat2([(3, 4, 5, 1)], header=b'')
    with pytest.warns(UserWarning, match='events.bin.* 4 of 6 events .* at byte 32') as caught:
        events = read_aedat2(put(tmp_path, data))
    assert rows(events) == [(1, 2, 3, 0), (3, 4, 5, 1)]
    assert len(caught) == 1


@FUNCTION_FIXTURE
@given(first=event_lists(128, 31), second=event_lists(128, 31), overflow=st.integers(0, 5))
def test_aedat3(tmp_path, first, second, overflow):
    """The clock overflows between two packets, and packets of other kinds are skipped."""
    other = packet3([(1, 2, 3, 1)] * 3, kind=0)
    imu = packet3([(1, 2, 3, 1)] * 5, kind=3, size=20, capacity=2)
    data = aedat3(other, packet3(first), imu, packet3(second, overflow), other)
    expected = first + [(t + overflow * 2**31, x, y, p) for t, x, y, p in second]
    assert rows(read_aedat3(put(tmp_path, data))) == expected


def test_aedat3_in_bytes(tmp_path):
    """An event that is marked as invalid counts, with a warning."""
    word = bytes([0b10 | 5 << 2, 0, 7 << 1, 0])  # y 5 from bit 2, x 7 from bit 17
    data = aedat3(struct.pack('<HHIIIIII', 1, 0, 8, 4, 1, 1, 1, 0) + word + bytes([9, 0, 0, 0]))
    with pytest.warns(UserWarning, match=f'1 of 1 events .* at byte {len(aedat3()) + 28}$'):
        assert rows(read_aedat3(put(tmp_path, data), (6, 8))) == [(2**31 + 9, 7, 5, 1)]
    assert rows(read_aedat3(put(tmp_path, aedat3()))) == []


@FUNCTION_FIXTURE
@given(events=event_lists(34, 23).filter(len))
def test_nmnist(tmp_path, events):
    assert rows(read_nmnist(put(tmp_path, nmnist(events)))) == events


def test_nmnist_in_bytes(tmp_path):
    data = bytes([3, 30, 0x80, 1, 2, 33, 0, 0x7F, 0xFF, 0xFF])
    assert rows(read_nmnist(put(tmp_path, data))) == [(0x102, 3, 30, 1), (2**23 - 1, 33, 0, 0)]


def test_nmnist_overflow_marks(tmp_path):
    """Each mark adds 8,192 us to the following times, regardless of its other bits."""
    mark = bytes([99, 240, 0xFF, 0xFF, 0xFF])
    first, second, third = (nmnist([event]) for event in [(8000, 1, 2, 1), (5, 3, 4, 0), (6, 5, 6, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        events = read_nmnist(put(tmp_path, first + mark + second + mark + mark + third))
    assert rows(events) == [(8000, 1, 2, 1), (8192 + 5, 3, 4, 0), (3 * 8192 + 6, 5, 6, 1)]
    assert rows(read_nmnist(put(tmp_path, mark))) == []
    with pytest.raises(ValueError, match='damaged at byte 10: .* y 241,'):
        read_nmnist(put(tmp_path, first + mark + bytes([0, 241, 0, 0, 0])), (240, 256))
    for size in ((241, 34), (34, 257), 300):
        with raises(ValueError, 'size', size):
            read_nmnist(put(tmp_path, first), size)


@pytest.mark.parametrize(
    ('reader', 'write', 'start'),
    [
        (read_aedat2, aedat2, len(aedat2([]))),
        (read_aedat3, lambda events: aedat3(packet3(events)), len(aedat3()) + 28),
        (read_nmnist, nmnist, 0),
    ],
)
def test_jumps_of_time(tmp_path, reader, write, start):
    """A warning has the number of jumps, and the size and offset of the first three; the times stay as they are."""
    width = 5 if reader is read_nmnist else 8

    def warned(times):
        events = [(t, 1, 1, 1) for t in times]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            assert rows(reader(put(tmp_path, write(events)))) == events
        return [str(warning.message) for warning in caught]

    assert warned([5, 5, 9, 8_000_000]) == []
    (text,) = warned([50, 47, 60, 55, 70, 63, 64, 1])
    assert '4 of 8 events' in text
    assert f'-3 at byte {start + width}, -5 at byte {start + 3 * width}, -7 at byte {start + 5 * width}, ...' in text
    if reader is not read_nmnist:  # whose clock has 8 s
        assert warned([0, 60_000_000]) == []
        (text,) = warned([1, 2, 60_000_003])
        assert '1 of 3 events' in text
        assert text.endswith(f' 60000001 at byte {start + 2 * width}')


START2, START3 = len(aedat2([])), len(aedat3())
GOOD = [(5, 1, 2, 1)] * 3


@pytest.mark.parametrize(
    ('reader', 'data', 'offset', 'value'),
    [
        (read_aedat2, b'', 0, 'empty'),
        (read_aedat2, b'\0' * 16, 0, r"b'\x00"),
        (read_aedat2, b'#!AER-DAT2.0\r\n# cut', 14, 'header'),
        (read_aedat2, b'#!AER-DAT3.1\r\n', 0, b'#!AER-DAT3.1'),
        (read_aedat2, aedat2(GOOD)[:-3], START2 + 16, '5 bytes'),
        (read_aedat2, aedat2(GOOD) + struct.pack('>II', 0x12345, 0), START2 + 24, '0x12345'),
        (read_aedat3, b'', 0, 'empty'),
        (read_aedat3, b'#!AER-DAT2.0\r\n', 0, b'#!AER-DAT2.0'),
        (read_aedat3, aedat3()[:-1], 0, 'END-HEADER'),
        (read_aedat3, aedat3(packet3(GOOD), packet3(GOOD)[:20]), START3 + 52, '20 bytes'),
        (read_aedat3, aedat3(packet3(GOOD))[:-1], START3 + 28, '23 bytes'),
        (read_aedat3, aedat3(packet3([], kind=7, size=9, capacity=1)), START3 + 28, '1 events of 9 bytes'),
        (read_aedat3, aedat3(packet3(GOOD, number=2)), START3 + 28, '2'),
        (read_aedat3, aedat3(packet3([], capacity=-1)), START3, '-1'),
        (read_aedat3, aedat3(packet3(GOOD, overflow=-1)), START3, '-1'),
        (read_aedat3, aedat3(packet3([], size=4, capacity=0)), START3 + 28, '4'),
        (read_aedat3, aedat3(packet3(GOOD[:1], kind=0), packet3([*GOOD, (1, 128, 0, 1)])), START3 + 88, 'x 128, y 0'),
        (read_aedat3, aedat3(packet3(GOOD), packet3([(2**31, 1, 1, 1)])), START3 + 84, '0x80000000'),
        (read_nmnist, b'', 0, 'empty'),
        (read_nmnist, nmnist(GOOD)[:-1], 10, '4 bytes'),
        (read_nmnist, nmnist([*GOOD, (0, 0, 34, 1), (0, 1, 1, 1), (0, 99, 0, 1)]), 15, 'x 0, y 34'),
    ],
)
def test_damaged(tmp_path, reader, data, offset, value):
    path = put(tmp_path, data)
    with raises(ValueError, f"event file '{path}' is damaged at byte {offset}", value):
        reader(path)
    with raises(FileNotFoundError, str(tmp_path / 'gone')):
        reader(tmp_path / 'gone')


@FUNCTION_FIXTURE
@given(data=st.data())
def test_any_damage(tmp_path, data):
    """A file that is cut off or overwritten gives events inside of the sensor, or the error that names it."""
    whole, reader, side = data.draw(
        st.sampled_from(
            [
                (aedat2(GOOD), read_aedat2, 128),
                (aedat3(packet3(GOOD), packet3(GOOD)), read_aedat3, 128),
                (nmnist(GOOD), read_nmnist, 34),
            ]
        )
    )
    at = data.draw(st.integers(0, len(whole)))
    path = put(tmp_path, whole[:at] + data.draw(st.binary(max_size=12)) + whole[at + data.draw(st.integers(0, 12)) :])
    try:
        events = reader(path)
    except ValueError as error:
        assert str(error).startswith(f"event file '{path}' is damaged at byte ")  # noqa: PT017
    else:
        assert all(0 <= x < side and 0 <= y < side and p in (0, 1) for t, x, y, p in rows(events))


def loop_frames(events, size, segments):
    """Count one event after another; ``segments`` holds the indices of each frame's events."""
    frames = np.zeros((len(segments), 2, *size), np.float32)
    for frame, indices in zip(frames, segments):
        for i in indices:
            frame[events.p[i], events.y[i], events.x[i]] += 1
    return frames


@pytest.mark.parametrize(('count', 'frames'), [(100, 16), (100, 7), (96, 16), (5, 16), (1, 1), (16, 16), (0, 4)])
def test_frames_by_number(count, frames):
    """Frames have floor(N / M) events each; the last one also has the rest."""
    events, each = make_events(np.random.default_rng(count), count), count // frames
    segments = [range(each * j, each * (j + 1)) for j in range(frames - 1)] + [range(each * (frames - 1), count)]
    out = to_frames(events, (8, 9), frames)
    assert (out.dtype, out.shape, out.sum()) == (np.float32, (frames, 2, 8, 9), count)
    np.testing.assert_array_equal(out, loop_frames(events, (8, 9), segments))


@pytest.mark.parametrize(
    ('count', 'frames', 'span'), [(100, 16, 1000), (300, 7, 10**6), (3, 16, 1000), (9, 4, 3), (0, 4, 9)]
)
def test_frames_by_time(count, frames, span):
    """Frames have equal durations, starting at the first event; the last one also has the rest."""
    events = make_events(np.random.default_rng(count), count, span=span)
    t = events.t.tolist()
    each = max(1, (t[-1] - t[0]) // frames) if t else 1
    segments = [[] for _ in range(frames)]
    for i in range(count):
        j = 0
        while j < frames - 1 and t[i] >= t[0] + each * (j + 1):
            j += 1
        segments[j].append(i)
    out = to_frames(events, 8, frames, by='time')
    assert out.shape == (frames, 2, 8, 8)
    np.testing.assert_array_equal(out, loop_frames(events, (8, 8), segments))


@pytest.mark.parametrize(('count', 'duration', 'span'), [(100, 90, 1000), (100, 10**6, 1000), (3, 10, 1000), (4, 1, 3)])
def test_frames_of_a_duration(count, duration, span):
    events = make_events(np.random.default_rng(count), count, span=span)
    start, end = events.t[0], events.t[-1]
    segments = [
        np.flatnonzero((events.t >= begin) & (events.t < begin + duration)) for begin in range(start, end + 1, duration)
    ]
    out = to_frames(events, 8, duration=duration)
    assert out.sum() == count
    np.testing.assert_array_equal(out, loop_frames(events, (8, 8), segments))


def test_frames_that_are_too_many():
    """Small files must not allocate hundreds of gigabytes: more than 100 frames need an event per frame."""
    t = np.arange(10_000) * 10
    zeros = np.zeros(10_000, np.int64)
    events = make_types(t, zeros, zeros, zeros)
    for rule in (dict(duration=10), dict(frames=10_000)):
        np.testing.assert_array_equal(to_frames(events, 1, **rule)[:, :, 0, 0], [[1, 0]] * 10_000)
    for name, value in (('duration', 9), ('frames', 10_001)):
        with raises(ValueError, name, value):
            to_frames(events, 1, **{name: value})
    few = Events(*(values[::1000] for values in events))
    for rule, count in ((dict(duration=901), 100), (dict(frames=100), 100), (dict(frames=100, by='time'), 100)):
        assert to_frames(few, 1, **rule).shape == (count, 2, 1, 1)
    for rule in (dict(duration=900), dict(frames=101), dict(frames=101, by='time')):
        with raises(ValueError, *next(iter(rule.items()))):
            to_frames(few, 1, **rule)


def test_polarities():
    """The polarities 0 and 1 have a channel each, for any type; -1 is an error."""
    t = np.arange(4)
    for p in (np.array([0, 1, 1, 1]), np.array([0, 1, 1, 1], bool), np.array([0, 1, 1, 1], np.uint8)):
        frames = to_frames(Events(t, t, t, p), 4, frames=1)
        assert frames.sum((0, 2, 3)).tolist() == [1, 3]
    signed = np.array([-1, 1, 1, -1], np.int8)
    with raises(ValueError, 'p', -1) as info:
        to_frames(Events(t, t, t, signed), 4, frames=1)
    assert '2 events' in str(info.value)
    assert to_frames(Events(t, t, t, (signed + 1) // 2), 4, frames=1).sum((0, 2, 3)).tolist() == [2, 2]
    with raises(ValueError, 'p', 2):
        to_frames(Events(t, t, t, np.array([0, 1, 2, 1])), 4, frames=1)


@pytest.mark.parametrize('rule', RULES)
def test_frames_of_other_arrays(rule):
    """Unsigned types give equal frames, and the order of events matters only if they are split by number."""
    events = make_events(np.random.default_rng(0), 50)
    expected = to_frames(events, 8, **rule)
    np.testing.assert_array_equal(to_frames(Events(*(v.astype(np.uint64) for v in events)), 8, **rule), expected)
    if rule != RULES[0]:
        order = np.random.default_rng(1).permutation(50)
        np.testing.assert_array_equal(to_frames(Events(*(v[order] for v in events)), 8, **rule), expected)
    empty = to_frames(Events(*np.empty((4, 0), np.int64)), 8, **rule)
    assert empty.shape == (rule.get('frames', 1), 2, 8, 8)
    with raises(TypeError, 'events'):
        to_frames(np.zeros((3, 4), np.int64), 8, **rule)


@pytest.mark.parametrize(
    ('name', 'values', 'error'),
    [
        ('t', np.array([0.0, 1.0, 2.0]), TypeError),
        ('x', np.array(['0', '1', '2']), TypeError),
        ('y', [0, 1, 2], TypeError),
        ('p', np.zeros(2, np.int8), ValueError),
        ('x', np.zeros((3, 1), np.int16), ValueError),
        ('t', np.array([0, 1, 2**62]), ValueError),
        ('t', np.array([-(2**63), 0, 2**63 - 1]), ValueError),
    ],
)
def test_arrays_that_are_not_events(name, values, error):
    events = make_types([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 0])._replace(**{name: values})
    for rule in RULES:
        with raises(error, name):
            to_frames(events, 4, **rule)


@pytest.mark.parametrize(
    ('rule', 'error', 'name'),
    [
        (dict(frames=None), ValueError, 'frames'),
        (dict(duration=3), ValueError, 'duration'),
        (dict(frames=0), ValueError, 'frames'),
        (dict(frames=2.0), TypeError, 'frames'),
        (dict(frames=None, duration=0), ValueError, 'duration'),
        (dict(by='events'), ValueError, 'by'),
        (dict(size=(7, 7)), ValueError, 'size'),
        (dict(size=(1, 8)), ValueError, 'size'),
        (dict(size=(8, 8, 8)), ValueError, 'size'),
    ],
)
def test_bad_arguments(rule, error, name):
    events = make_types([0, 9], [0, 7], [0, 1], [0, 1])
    with raises(error, name, rule.get(name)):
        to_frames(events, **{'size': 8, 'frames': 2, **rule})
