"""Numbers published by others: HellaSwag accuracies, losses of OpenAI's weights, and training speeds; none was measured
here."""

from typing import NamedTuple

HELLASWAG_ROWS = 10_042  # of the validation split
# (layers, width) of OpenAI's four models.
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
# How HellaSwag is scored: in the names of results and metrics, and for readers.
WAYS = {"llmc": "llm.c-style", "lmeval": "lm-eval-style"}
# Its accuracies: name in results and metrics, and for readers.
ACCURACIES = {f"{way}_{kind}": f"{kind}, {style}" for way, style in WAYS.items() for kind in ("acc", "acc_norm")}
# For each scoring style: the model scored, and (acc, acc_norm) on all 10,042 rows; None if not published.
HELLASWAG = {
    "llmc": {
        "GPT-2 124M, OpenAI": (0.2859, 0.2955),
        "GPT-2 350M, OpenAI": (None, 0.3752),
        "GPT-2 774M, OpenAI": (None, 0.4320),
        "GPT-2 1558M, OpenAI": (0.3842, 0.4893),
        "124M, llm.c, 10 B tokens of FineWeb": (None, 0.299),
        "124M, llm.c run by S. Emani in 1 h 47": (None, 0.310),
        "124M, Kaggle TPU, FineWeb-Edu": (None, 0.2962),
        "124M, scaling journal": (0.2886, 0.3007),
        "1558M, scaling journal, 10 B tokens": (0.3450, 0.4122),
    },
    "lmeval": {"GPT-2 124M, OpenAI": (0.2892, 0.3114), "GPT-2 1558M, OpenAI": (0.4004, 0.5089)},
}
SOURCES = {
    "llmc": "124M, 1558M: docstring of karpathy/build-nanogpt hellaswag.py; 350M, 774M: karpathy/llm.c "
    "dev/vislog.ipynb; llm.c: its discussion 481; Emani: README of SiddanthEmani/GPT-2-124M-CUDA; "
    "Kaggle: ducto489.github.io/projects/train-gpt-2-with-tpu, whose OpenAI row is 0.2945; journal: "
    "jjschwartz.github.io/blog/scaling-gpt2, whose code scores as llm.c's does",
    "lmeval": "harness numbers quoted in the docstring of karpathy/build-nanogpt hellaswag.py",
}
# Validation loss of OpenAI's weights in nats per token, by data set.
OPENAI_LOSS = {
    "FineWeb-Edu": {"124M": 3.2924},
    "FineWeb": {"124M": 3.424958, "350M": 3.083089, "774M": 3.000580, "1558M": 2.831273},
    "OpenWebText": {"124M": 3.12, "350M": 2.84, "774M": 2.67, "1558M": 2.54},
}
OPENAI_LOSS_SOURCE = {
    "FineWeb-Edu": "karpathy/build-nanogpt, play.ipynb (at 6104ab1), on its validation shard of FineWeb-Edu 10B",
    "FineWeb": "karpathy/llm.c, dev/vislog.ipynb (at f1e2ace; May 2024, when FineWeb was its only web data; it does "
    "not name the sample whose validation shard it used)",
    "OpenWebText": "karpathy/nanoGPT, README (at 3adf61e), on its own split of OpenWebText",
}


class Speed(NamedTuple):
    """`run` is a key of SPEED_SOURCES; `device` its name in recipe.engine.hardware.DEVICES, or one not listed there;
    `size` a recipe of the same model; `memory` in MiB per device, None if not published."""

    run: str
    setup: str
    count: int
    device: str
    size: str
    tokens_per_second: float
    memory: int | None = None


# Of the journal on one H100, each row is on top of those above.
SPEEDS = (
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
SPEED_SOURCES = {
    "journal": "jjschwartz.github.io/blog/scaling-gpt2, which rounds 350,000 and 320,000",
    "llm.c": "karpathy/llm.c, discussions 481 (300 ms a step of 524,288 tokens) and 677",
    "llm.c by Emani": "README of SiddanthEmani/GPT-2-124M-CUDA, whose 60 % MFU is by another formula",
}
