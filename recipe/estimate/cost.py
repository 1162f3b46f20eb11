"""How long the recipes of GPT-2's sizes take, and what they cost, by arithmetic at an assumed MFU."""

from __future__ import annotations

from recipe.config import parse_config
from recipe.engine.device import PEAK_FLOPS
from recipe.estimate.memory import MFU, flops_per_token, parameter_count, plural, price, si, training_seconds

RECIPES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
DEVICES = ((8, "A100"), (8, "H100"), (1, "H100"), (1, "RTX 4090"))  # how many, and a name of PEAK_FLOPS


def table(mfu: float = MFU, price_per_hour: float = 0.0) -> list[dict]:
    """A row a recipe and device: hours at `mfu` of the peak of all devices, and dollars at `price_per_hour` of one.
    Validation, saving and communication are not in it."""
    rows = []
    for recipe in RECIPES:
        config = parse_config([f"--config={recipe}"])
        tokens = config.optimizer.max_steps * config.optimizer.total_batch_tokens
        flops = flops_per_token(config.model, config.data.sequence_length)
        for count, name in DEVICES:
            seconds = training_seconds(tokens, flops, PEAK_FLOPS[name] * count, mfu)
            hours = seconds / 3600
            dollars = price(seconds, count, price_per_hour) if price_per_hour else None
            rows.append(
                {
                    "recipe": recipe,
                    "parameters": parameter_count(config.model),
                    "tokens": tokens,
                    "flops": tokens * flops,
                    "devices": count,
                    "device": name,
                    "mfu": mfu,
                    "hours": hours,
                    "device_hours": count * hours,
                    "dollars": dollars,
                }
            )
    return rows


def lines(rows: list[dict], price_per_hour: float = 0.0) -> list[str]:
    """`table` for the terminal."""
    price = f", ${price_per_hour:g} an hour of a device" if price_per_hour else "; --price_per_hour 2 adds dollars"
    out = [f"cost       reckoned, not measured: {rows[0]['mfu']:.0%} MFU of the dense bf16 peak{price}"]
    for row in rows:
        if row["device"] == DEVICES[0][1] and row["devices"] == DEVICES[0][0]:
            out.append(
                f"{row['recipe']}, {si(row['parameters'], 'B')} parameters, {si(row['tokens'], 'B')} tokens, "
                f"{row['flops']:.2g} FLOP"
            )
        hours = f"{row['hours']:8.1f} h" if row["hours"] < 48 else f"{row['hours'] / 24:8.1f} days"
        dollars = f"  ${row['dollars']:,.0f}" if row["dollars"] is not None else ""
        devices = f"{row['devices']} x {row['device']}"
        out.append(f"  {devices:14} {hours:13}  {plural(round(row['device_hours']), 'device-hour'):>20}{dollars}")
    return out
