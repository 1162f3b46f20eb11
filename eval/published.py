"""Results published by others: HellaSwag accuracies, losses and training speeds, each with its source. None was
measured here, and the docs quote no other project's figure that is not here (tests/eval/test_published.py)."""

from typing import NamedTuple

HELLASWAG_ROWS = 10_042  # of the validation split
# (layers, width) of OpenAI's four models.
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
# Scoring styles of HellaSwag: name in results and metrics -> name for readers.
STYLES = {"llmc": "llm.c-style", "lmeval": "lm-eval-style"}
# HellaSwag's accuracies: name in results and metrics -> name for readers.
ACCURACIES = {f"{style}_{kind}": f"{kind}, {title}" for style, title in STYLES.items() for kind in ("acc", "acc_norm")}
# Scoring style -> model -> (acc, acc_norm) on all 10,042 rows; None if not published.
HELLASWAG = {
    "llmc": {
        "GPT-2 124M, OpenAI": (0.2859, 0.2955),
        "GPT-2 350M, OpenAI": (None, 0.3752),
        "GPT-2 774M, OpenAI": (None, 0.4320),
        "GPT-2 1558M, OpenAI": (0.3842, 0.4893),
        "124M, llm.c, 10 B tokens of FineWeb": (None, 0.299),
        "124M, llm.c run by S. Emani": (None, 0.3054),
        "124M, Kaggle TPU, FineWeb-Edu": (None, 0.2962),
        "124M, scaling journal": (0.2886, 0.3007),
        "1558M, scaling journal, 10 B tokens": (0.3450, 0.4122),
    },
    "lmeval": {
        "GPT-2 124M, OpenAI": (0.2892, 0.3114),
        "GPT-2 1558M, OpenAI": (0.4004, 0.5089),
        "124M, AdamW, 50 B tokens of FineWeb-Edu (MARS)": (None, 0.3626),
        "124M, MARS, 50 B tokens of FineWeb-Edu": (None, 0.3691),
    },
}
SOURCES = {
    "llmc": "124M, 1558M: docstring of karpathy/build-nanogpt hellaswag.py; 350M, 774M: karpathy/llm.c "
    "dev/vislog.ipynb; llm.c: its discussion 481; Emani: log124M/main.log of SiddanthEmani/GPT-2-124M-CUDA (7f9c49c), "
    "at its end, 0.3059 at most, where its README says 31.0; Kaggle: ducto489.github.io/projects/train-gpt-2-with-tpu, "
    "whose OpenAI row is 0.2945; journal: jjschwartz.github.io/blog/scaling-gpt2, whose code scores as llm.c's does",
    "lmeval": "OpenAI: harness numbers quoted in the docstring of karpathy/build-nanogpt hellaswag.py; MARS: README of "
    "AGI-Arena/MARS (4831e28), acc_norm by its rows for OpenAI's weights",
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


_TRACK = "modded-nanogpt, records/track_3_optimization"
_MARS = "README of AGI-Arena/MARS (4831e28, March 2026)"
_JAX = "windmaple/LLM_from_scratch.JAX (adf0ede, November 2025), 02.GPT2-pretraining"
# Validation losses in nats per token: data, model, run, billions of tokens, loss after that many, source.
LOSSES = (
    ("FineWeb", "124M", "llm.c", "10.26", "3.2722", "KellerJordan/modded-nanogpt (f411b3d), 2024-10-13_llmc"),
    ("FineWeb", "124M", "llm.c, run by S. Emani", "10.25", "3.2731", "SiddanthEmani/GPT-2-124M-CUDA, its log"),
    ("FineWeb", "124M, RMSNorm, no biases", "AdamW", "6.44; 10", "3.2753; 3.2267", "modded-nanogpt at 93fb178, README"),
    ("FineWeb", "124M, rotary, untied head", "AdamW, 4,950 steps", "2.6", "3.2776", f"{_TRACK}, open pull request 353"),
    ("FineWeb", "124M, rotary, untied head", "Muon, 3,250 steps", "1.7", "3.2787", f"{_TRACK}, entry 36"),
    ("FineWeb-Edu", "124M", "build-nanogpt, reproduced", "10", "3.075", "rahulmeena/build-nanogpt at a834ca8"),
    ("a validation set not named", "124M", "Kaggle TPU, FineWeb-Edu", "", "3.2754", "ducto489.github.io"),
    ("OpenWebText", "124M", "nanoGPT, about 4 days", "196; 295", "2.905; 2.85", "karpathy/nanoGPT (3adf61e), README"),
    ("OpenWebText", "124M, rotary", "litgpt", "300", "2.861", "Lightning-AI/litgpt issue 1607 (July 2024)"),
    ("OpenWebText", "124M", "JAX on a TPU", "6.6", "3.09", _JAX),
    ("OpenWebText", "350M", "JAX on a TPU, 22.5 h on a v3", "", "2.86", _JAX),
    ("OpenWebText", "124M, no biases", "AdamW", "5; 20; 50", "3.193; 3.024; 2.885", _MARS),
    ("OpenWebText", "124M, no biases", "Muon without decay", "5; 20; 50", "3.165; 3.006; 2.901", _MARS),
    ("OpenWebText", "124M, no biases", "MARS", "5; 20; 50", "3.108; 2.981; 2.849", _MARS),
)


class Speed(NamedTuple):
    """The training speed that `run`, a key of SPEED_SOURCES, reports for GPT-2 of a size in SIZES on `count` devices.
    `device` is the name in recipe.engine.hardware.DEVICES if it is one of those."""

    run: str
    setup: str
    count: int
    device: str
    size: str
    tokens_per_second: float


# Each source's steps on the way to its best speed, for the scoreboard but not for estimates: a row adds its change to
# those of the rows above, with a batch of one sequence if none is named.
SLOWER = (
    Speed("the scaling journal", "fp32, on the CPU", 1, "M3", "124M", 645),
    Speed("the scaling journal", "fp32, on the GPU, by MPS", 1, "M3", "124M", 1_149),
    Speed("the scaling journal", "fp32", 1, "RTX 3090", "124M", 11_381),
    Speed("the scaling journal", "fp32", 1, "H100", "124M", 27_026),
    Speed("the scaling journal", "bf16", 1, "H100", "124M", 42_871),
    Speed("the scaling journal", "flash attention", 1, "H100", "124M", 48_154),
    Speed("the scaling journal", "compiled", 1, "H100", "124M", 55_271),
    Speed("the scaling journal", "fused AdamW", 1, "H100", "124M", 78_750),
    Speed("the scaling journal", "tensor cores for fp32, too", 1, "H100", "124M", 79_013),
    Speed("the scaling journal", "batch of 2", 1, "H100", "124M", 150_836),
    Speed("the scaling journal", "batch of 4", 1, "H100", "124M", 217_249),
    Speed("the scaling journal", "batch of 8", 1, "H100", "124M", 272_887),
    Speed("the scaling journal", "batch of 16", 1, "H100", "124M", 319_727),
    Speed("the scaling journal", "batch of 32", 1, "H100", "124M", 329_105),
    Speed("the video", "fp32, batch of 16; 1,000 ms a step", 1, "A100", "124M", 16_384 / 1.0),
    Speed("the video", "TF32; 333 ms", 1, "A100", "124M", 16_384 / 0.333),
    Speed("the video", "bf16; 300 ms", 1, "A100", "124M", 16_384 / 0.3),
    Speed("the video", "compiled; 130 ms", 1, "A100", "124M", 16_384 / 0.13),
    Speed("the video", "flash attention; 96 ms", 1, "A100", "124M", 16_384 / 0.096),
    Speed("the video", "vocabulary of 50,304; 93 ms", 1, "A100", "124M", 16_384 / 0.093),
    Speed("the video", "fused AdamW; 90 ms", 1, "A100", "124M", 16_384 / 0.09),
    Speed("the video", "DDP, as the Kaggle notebook quotes it", 8, "A100", "124M", 1_242_000),
    Speed("a Kaggle notebook", "fp32", 2, "T4", "124M", 7_400),
)
# The best speed of a source on a device, for estimates too.
SPEEDS = (
    Speed("the scaling journal", "batch of 64", 1, "H100", "124M", 349_179),
    Speed("the scaling journal", "64 of 512 a step", 1, "H100", "124M", 418_821),
    Speed("the scaling journal", "64 of 512 a step; DDP", 2, "H100", "124M", 825_314),
    Speed("the scaling journal", "64 of 512 a step; DDP", 4, "H100", "124M", 1_595_618),
    Speed("the scaling journal", "DDP, sharded moments; 59.5 min", 8, "H100", "124M", 3_046_409),
    Speed("llm.c in October 2024", "ZeRO-1; 140 ms a step", 8, "H100", "124M", 524_288 / 0.140),
    Speed("the scaling journal", "DDP, sharded moments; 582 min", 8, "H100", "1558M", 320_000),
    Speed("llm.c", "ZeRO-1; 2.8 s a step, 24 h, $672", 8, "H100", "1558M", 1_048_576 / 2.8),
    Speed("llm.c", "ZeRO-1; 300 ms a step, 94.3 min, $20", 8, "A100", "124M", 524_288 / 0.3),
    Speed("S. Emani with llm.c", "ZeRO-1; 1 h 47 min, $20", 8, "A100 40GB", "124M", 1_590_000),
    Speed("llm.c", "ZeRO-1; 820 ms a step, 13.7 h, $200", 8, "A100", "350M", 524_288 / 0.82),
    Speed("llm.c", "ZeRO-1; 1.7 s a step, 135 h, $2000", 8, "A100", "774M", 524_288 / 1.7),
    Speed("a Kaggle notebook", "PyTorch/XLA, bf16", 8, "TPU V3", "124M", 243_000),
    Speed("windmaple in JAX", "bf16; 22,974 s", 8, "TPU V3", "124M", 90_000 * 73_728 / 22_974),
    Speed("windmaple in JAX", "bf16; 82 min", 8, "TPU V6E", "124M", 90_000 * 73_728 / (82 * 60)),
)
SPEED_SOURCES = {
    "the scaling journal": "jjschwartz.github.io/blog/scaling-gpt2 (July 2025), torch 2.5.1; batches and up to 4 H100: "
    "Jjschwartz/gollem (9bdf113), experiments/gpt2/5_batch_results.csv and 6_gpt2_124M_DDP.ipynb; it has 1,499 for "
    "MPS in another place",
    "the video": "Andrej Karpathy, Let's reproduce GPT-2 (124M), youtu.be/l8pRSuU81PU (June 2024): the times of a step "
    "of 16 x 1,024 tokens in its table of contents",
    "llm.c": "karpathy/llm.c (f1e2ace), scripts/run_gpt2_124M.sh, 350M, 774M (May 2024), 1558M (July 2024); CUDA",
    "llm.c in October 2024": "KellerJordan/modded-nanogpt (f411b3d), records/track_1_short/2024-10-13_llmc",
    "S. Emani with llm.c": "SiddanthEmani/GPT-2-124M-CUDA (7f9c49c, March 2025), whose 60 % MFU is not by our formula",
    "a Kaggle notebook": "ducto489.github.io/projects/train-gpt-2-with-tpu, which does not say which TPU (Kaggle had a "
    "v3-8), nor how many tokens it took in 18 hours",
    "windmaple in JAX": f"{_JAX}: a log of 90,000 steps of 73,728 tokens on 8 cores of a v3; of Trillium only the "
    "minutes, taken for as many tokens on 8 chips",
}
