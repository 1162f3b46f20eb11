"""Numbers with their units, and lists of names, as messages show them."""

from collections.abc import Iterable


def plural(n: int, noun: str, ending: str = "s") -> str:
    """1 step, 2 steps."""
    return f"{n} {noun}{ending if n != 1 else ''}"


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few names: 'a, b, c and 2 more'."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def gb(size: float) -> str:
    """79123456789 bytes -> '79.1 GB'; for comparing, so always in GB."""
    return f"{size / 1e9:.1f} GB"


def si(value: float, billion: str = "G") -> str:
    """1234567 -> '1.23 M'; a billion bytes are a G, a billion tokens a B."""
    for unit, size in (("T", 1e12), (billion, 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float, short: bool = False) -> str:
    """In the two largest units that matter: '45 s', '3 min 20 s', '47 min', '3 h 12 min', '5 d 3 h'; or '3h12m'."""
    s = max(0, round(seconds))
    if seconds < 9.95 and not short:
        parts = [(f"{max(0, seconds):.1f}", "s")]
    elif s < 60:
        parts = [(s, "s")]
    elif s < 600:
        parts = [(s // 60, "min"), (s % 60, "s")]
    elif s < 3570:
        parts = [(round(s / 60), "min")]
    elif (minutes := round(s / 60)) < 48 * 60:
        parts = [(minutes // 60, "h"), (minutes % 60, "min")]
    else:
        hours = round(s / 3600)
        parts = [(hours // 24, "d"), (hours % 24, "h")]
    kept = [(n, unit) for i, (n, unit) in enumerate(parts) if n or not i]
    return "".join(f"{n}{unit[0]}" for n, unit in kept) if short else " ".join(f"{n} {unit}" for n, unit in kept)
