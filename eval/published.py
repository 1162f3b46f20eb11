"""Numbers published by others: HellaSwag accuracies and losses of OpenAI's weights; none was measured here."""

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
