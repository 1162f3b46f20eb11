"""Speeds that others have published for training GPT-2, each with its source; none of them was measured here."""

from typing import NamedTuple


class Speed(NamedTuple):
    """`run` is a key of SOURCES; `device` by its name in recipe.engine.device.DEVICES, or one that is not there; `size`
    a recipe of the same model; `memory` in MiB of a device, None where that was not published."""

    run: str
    setup: str
    count: int
    device: str
    size: str
    tokens_per_second: float
    memory: int | None = None


# Of the journal on one H100, each row is on top of those above.
PUBLISHED = (
    Speed("journal", "fp32, batch of 1", 1, "M3 (CPU)", "gpt2", 645),
    Speed("journal", "fp32, batch of 1", 1, "RTX 3090", "gpt2", 11_381),
    Speed("journal", "fp32, batch of 1", 1, "H100", "gpt2", 27_026, 4371),
    Speed("journal", "bf16", 1, "H100", "gpt2", 42_871, 3514),
    Speed("journal", "flash attention", 1, "H100", "gpt2", 48_154, 2655),
    Speed("journal", "compile", 1, "H100", "gpt2", 55_271, 2448),
    Speed("journal", "fused AdamW", 1, "H100", "gpt2", 78_750, 2463),
    Speed("journal", "batch of 64", 1, "H100", "gpt2", 350_000),
    Speed("journal", "DDP", 8, "H100", "gpt2", 3_046_409),
    Speed("journal", "DDP", 8, "H100", "gpt2-xl", 320_000),
    Speed("llm.c", "ZeRO-1", 8, "A100", "gpt2", 1_750_000),
    Speed("llm.c by Emani", "ZeRO-1", 8, "A100", "gpt2", 1_590_000),
    Speed("llm.c", "ZeRO-1", 8, "H100", "gpt2-xl", 374_000),
)
SOURCES = {
    "journal": "jjschwartz.github.io/blog/scaling-gpt2, which rounds 350,000 and 320,000",
    "llm.c": "karpathy/llm.c, discussions 481 (300 ms a step of 524,288 tokens) and 677",
    "llm.c by Emani": "README of SiddanthEmani/GPT-2-124M-CUDA, whose 60 % MFU is by another formula",
}
