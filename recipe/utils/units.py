"""Formats numbers with their units, and lists of names, for messages."""

from collections.abc import Iterable


def plural(n: int, noun: str, ending: str = "s") -> str:
    """1 step, 2,000 steps."""
    return f"{n:,} {noun}{ending if n != 1 else ''}"


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few names: 'a, b, c and 2 more'."""
    names = list(names)
    remaining = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {remaining} more" if remaining > 0 else "")


def gb(size: float) -> str:
    """79123456789 bytes -> '79.1 GB'; always in GB, so that sizes can be compared."""
    return f"{size / 1e9:.1f} GB"


def si(value: float, billion: str = "G") -> str:
    """1234567 -> '1.23 M'; `billion` is the unit of 1e9: G for bytes, B for tokens."""
    for unit, size in (("T", 1e12), (billion, 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # otherwise 999.8 M would be rounded to 1e+03 M
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """In the two largest units: '4.2 s', '45 s', '3 min 20 s', '3 h 12 min', '5 d 3 h'."""
    if seconds < 59.5:
        return f"{max(0, seconds):.{int(seconds < 9.95)}f} s"
    s, minutes, hours = round(seconds), round(seconds / 60), round(seconds / 3600)
    if s < 3600:
        parts = f"{s // 60} min", f"{s % 60} s"
    elif hours < 48:
        parts = f"{minutes // 60} h", f"{minutes % 60} min"
    else:
        parts = f"{hours // 24} d", f"{hours % 24} h"
    return parts[0] if parts[1].startswith("0 ") else " ".join(parts)
