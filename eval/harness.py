"""lm-evaluation-harness on a model: `python eval/harness.py MODEL --tasks lambada_openai,wikitext [--limit N]`.

Tasks are the harness's own, with its prompts, metrics and versions. HellaSwag reads the rows that ship with the
project, lambada_openai and wikitext those of --rows, if given; any other task downloads its data from the Hub. The
model is loaded as by the other commands; log-probabilities are computed in float32 whatever its dtype.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository, not from eval/ with its `common`, `sample`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from eval import common, hellaswag
from eval.scores import score

# Bootstrap resamples for metrics whose error has no closed form; the harness's default of 100,000 takes minutes.
BOOTSTRAP = 1000
# Tasks that can read local documents: the harness's folder, the split that is scored, other changes.
TASKS = {
    "hellaswag": ("hellaswag", "validation", {"training_split": None}),
    "lambada_openai": ("lambada", "test", {}),
    "wikitext": ("wikitext", "test", {"training_split": None, "validation_split": None}),
}


def require() -> None:
    """Raises UserError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise common.UserError("lm-eval is not installed: pip install -e '.[eval]' (make eval-lm does)")


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Context that silences the libraries' notices; progress bars only on a terminal."""
    import datasets

    os.environ["DISABLE_MULTIPROC"] = "1"  # otherwise it forks a pool for seconds of work
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),  # "bootstrapping for stddev"
        contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else nowhere),
    ):
        yield


@contextlib.contextmanager
def local_tasks(docs: dict[str, list[dict]], tasks: list[str]):
    """Context that yields a TaskManager knowing `tasks`. The tasks in `docs`, whose names are in TASKS, are the
    harness's own except that they read the documents given here."""
    import lm_eval.tasks

    theirs = Path(lm_eval.tasks.__file__).parent
    with tempfile.TemporaryDirectory(prefix="tasks-") as directory:
        for name, rows in docs.items():
            folder, split, more = TASKS[name]
            file = Path(directory, f"{name}.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            kwargs = {"data_files": {split: str(file)}, "cache_dir": f"{directory}/cache"}
            # `include` keeps the rest, and still finds the functions that it names.
            task = {"include": str(theirs / folder / f"{name}.yaml"), "task": name} | more
            task |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs}
            Path(directory, f"{name}.yaml").write_text(yaml.safe_dump(task))
        # Of two tasks with the same name the last wins. Reading all of the harness's thousands of tasks is slow.
        folders = [*{theirs / folder for folder, _, _ in TASKS.values()}, directory]
        yield lm_eval.tasks.TaskManager(include_path=folders, include_defaults=not set(tasks) <= set(TASKS))


def read_rows(words: list[str]) -> dict[str, list[dict]]:
    """{task: rows} from arguments TASK=FILE, each file JSON lines with the columns of the task's data set. Raises
    UserError for a task that is not in TASKS and for any other kind of file."""
    try:
        files = dict(word.split("=", 1) for word in words)
        rows = {task: [*map(json.loads, Path(file).read_bytes().splitlines())] for task, file in files.items()}
    except ValueError as error:
        raise common.UserError(f"--rows {' '.join(words)}: not TASK=FILE with a file of JSON lines ({error})") from None
    if unknown := rows.keys() - TASKS:
        raise common.UserError(f"--rows {', '.join(unknown)}: only {', '.join(TASKS)} can read rows from a file")
    return rows


def evaluate(
    loaded: common.Loaded, tasks: list[str], local: dict[str, list[dict]], *, limit: int | None = None, batch_size: int
) -> dict:
    """What lm_eval.simple_evaluate returns, "samples" included; `limit` is in rows per task, `local` has the rows of
    tasks that should not download them.

    Raises UserError for a task that the harness does not know, and for data that cannot be loaded.
    """
    docs = {"hellaswag": hellaswag.load_rows(limit)} | {task: rows[:limit] for task, rows in local.items()}
    with quiet(), local_tasks(docs, tasks) as manager:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        unknown = [task for task in tasks if task not in manager.all_tasks]
        if unknown:
            raise common.UserError(f"--tasks {','.join(unknown)}: lm-eval has none of this name (`lm-eval ls tasks`)")
        problem = "" if set(tasks) <= set(docs) else common.hub_problem()
        model, tokenizer = loaded.model, loaded.tokenizer
        lm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32", trust_remote_code=False)
        try:
            prepared = manager.load(tasks)
        except (OSError, RuntimeError) as error:  # no network, no such data set, or one that needs to run code
            reason = f"--tasks {','.join(tasks)}: the data cannot be loaded: {problem or common.first_line(error)}"
            raise common.UserError(f"{reason}. Without a network there is hellaswag, and what --rows names") from error
        manager.load = lambda _: prepared  # not a second time
        options = {"task_manager": manager, "limit": limit, "bootstrap_iters": BOOTSTRAP}
        return lm_eval.simple_evaluate(lm, tasks=tasks, **options)


def scores_of(results: dict, how: str, limit: int | None) -> list[dict]:
    """The scores in the output of `evaluate`; a filter other than none stays in the name."""
    url = "https://github.com/EleutherAI/lm-evaluation-harness"
    source = {"source_name": "lm-evaluation-harness", "source_url": url, "whole": not limit}
    found = []
    for task, metrics in results["results"].items():
        rows = f", {metrics['sample_len']:,} rows" if "sample_len" in metrics else ""
        data = {"dataset_type": task, "dataset_name": task}
        for key, value in metrics.items():  # "acc,none", its "acc_stderr,none", and others without a comma
            kind, comma, filtered = key.partition(",")
            if comma and not kind.endswith("_stderr"):
                error = metrics.get(f"{kind}_stderr,{filtered}")
                ci95 = 1.96 * error if isinstance(error, float) else None  # or N/A
                name = kind if filtered == "none" else f"{kind} ({filtered})"
                metric = "accuracy" if kind.startswith("acc") else kind, name
                found.append(score(data, metric, value, how + rows, ci95=ci95, **source))
    return found


def main() -> None:
    """Runs the tasks on one model, prints lm-eval's table and writes the results. Raises UserError."""
    parser = common.parser("lm-evaluation-harness's tasks.", batch_size=8, batch_unit="requests")
    parser.add_argument("--tasks", default="hellaswag", help="names, with commas between (default: hellaswag)")
    parser.add_argument(
        "--rows",
        nargs="*",
        default=[],
        metavar="TASK=FILE",
        help="JSON lines for lambada_openai (text) or wikitext (page), instead of the Hub's",
    )
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows of each task (default: all)")
    args = parser.parse_args()
    require()
    tasks = list(dict.fromkeys(task.strip() for task in args.tasks.split(",") if task.strip()))
    if not tasks:
        raise common.UserError("--tasks: names none. Give one: --tasks hellaswag")
    local = read_rows(args.rows)
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    results = evaluate(loaded, tasks, local, limit=args.limit, batch_size=args.batch_size)
    from lm_eval.utils import make_table

    print(f"\n{make_table(results)}")
    if results.get("groups"):
        print(make_table(results, "groups"))
    version = importlib.metadata.version("lm-eval")
    about = loaded.describe() | {"version": version, "limit": args.limit, "versions": results["versions"]}
    how = f"lm-evaluation-harness {version}" + (f", limit {args.limit:,}" if args.limit else "")
    found = scores_of(results, f"{how}, in {about['dtype']}", args.limit)
    common.write_results(output, "lm_eval", about | {"scores": found})


if __name__ == "__main__":
    common.run_main(main)
