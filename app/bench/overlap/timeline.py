"""One run as a picture: a lane each for compute, copies to the device, copies to the host, and storage. SVG."""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.overlap.recording import LANES, Event, Lane

_COLOURS: dict[Lane, str] = {
    "compute": "#4878a8",
    "to device": "#d1792c",
    "to host": "#5f9e5f",
    "storage": "#8a6bb1",
}
_LEFT, _WIDTH, _TOP = 90, 860, 28
_LANE_HEIGHT, _BAR_HEIGHT = 40, 24
_TICKS = 8


def draw_timeline(events: Sequence[Event]) -> str:
    """Of these events; bars of one lane that overlap are drawn over one another, half transparent."""
    begin = min((event.begin for event in events), default=0.0)
    end = max((event.end for event in events), default=begin)
    scale = _WIDTH / max(end - begin, 1e-9)
    bottom = _TOP + _LANE_HEIGHT * len(LANES)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {bottom + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in range(_TICKS + 1):
        x = _LEFT + _WIDTH * tick / _TICKS
        lines.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        label = 1e3 * (end - begin) * tick / _TICKS
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label:.0f} ms</text>')
    for number, lane in enumerate(LANES):
        y = _TOP + _LANE_HEIGHT * number
        lines.append(f'<text x="8" y="{y + _LANE_HEIGHT / 2 + 4:.0f}">{lane}</text>')
        lines += [
            f'<rect x="{_LEFT + (event.begin - begin) * scale:.1f}" y="{y + (_LANE_HEIGHT - _BAR_HEIGHT) // 2}" '
            f'width="{max((event.end - event.begin) * scale, 0.5):.1f}" height="{_BAR_HEIGHT}" '
            f'fill="{_COLOURS[lane]}" fill-opacity="0.6"><title>{_described(event)}</title></rect>'
            for event in events
            if event.lane == lane
        ]
    return "\n".join([*lines, "</svg>", ""])


def _described(event: Event) -> str:
    what = f"{event.rows} rows" if event.lane == "compute" else f"{event.num_bytes / 1e6:.1f} MB"
    return f"{what}, {1e3 * (event.end - event.begin):.1f} ms"
