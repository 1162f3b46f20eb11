"""lm-evaluation-harness on a model: `python eval/harness.py MODEL --tasks hellaswag,lambada_openai [--limit N]`.

Tasks are the harness's own, with its prompts, metrics and versions. HellaSwag reads the rows that ship with the
project, lambada_openai those of --rows, if given; any other task takes its data from the Hub. The model is the one that
the other commands load, and log-probabilities are computed in float32 whatever its dtype.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import yaml

from eval import common, hellaswag, lambada

# Resamplings for the error of metrics that have no closed form; the harness's own 100,000 take minutes.
BOOTSTRAP = 1000


def require() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise common.UserError("lm-eval is not installed: pip install -e '.[eval]' (make eval-lm does)")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' notices; bars only on a terminal."""
    from datasets.utils import logging as datasets_logging

    os.environ["DISABLE_MULTIPROC"] = "1"  # it would fork a pool for what one process does in seconds
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets_logging.set_verbosity_error()
    datasets_logging.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # "bootstrapping for stddev"
        yield


@contextlib.contextmanager
def local_tasks(rows: Path | None = None, limit: int | None = None, hellaswag_rows: list[dict] | None = None):
    """Context: a TaskManager of the harness's LAMBADA tasks and of `write_local_tasks`; its `whole()` makes one of all
    that the harness has, which takes a while."""
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory(prefix="tasks-") as directory:
        write_local_tasks(Path(directory), rows, limit, hellaswag_rows)
        # Reading all of the harness's thousands of task files takes a while; of two tasks of one name the last counts.
        manager = TaskManager(include_path=[harness_tasks() / "lambada", directory], include_defaults=False)
        manager.whole = lambda: TaskManager(include_path=directory)
        yield manager


def write_local_tasks(
    directory: Path, rows: Path | None, limit: int | None, hellaswag_rows: list[dict] | None = None
) -> list[str]:
    """Task files of the harness's own tasks with nothing but the place of their data changed; the tasks' names.

    `rows` are LAMBADA's (`eval.lambada.read_rows`). Of all data the first `limit` rows, or all, are written beside.
    """
    theirs = harness_tasks()
    local = {
        "hellaswag": ("hellaswag", "validation", hellaswag_rows or hellaswag.load_rows(limit), {"training_split": None})
    }
    if rows:
        texts = [{"text": text} for text in lambada.read_rows(rows)[:limit]]
        local["lambada_openai"] = ("lambada", "test", texts, {})
    for name, (folder, split, docs, more) in local.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        kwargs = {"data_files": {split: str(file)}, "cache_dir": str(directory / "cache")}
        # `include` keeps the rest, and finds the functions that it names where they are.
        task = {"include": str(theirs / folder / f"{name}.yaml"), "task": name} | more
        task |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return list(local)


def harness_tasks() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def evaluate(
    loaded: common.Loaded,
    tasks: list[str],
    *,
    rows: Path | None = None,
    limit: int | None = None,
    batch_size: int,
) -> dict:
    """What lm_eval.simple_evaluate returns, "samples" included; `limit` is in rows of each task.

    Raises UserError for a task that the harness does not know, and for data that cannot be had.
    """
    require()
    with quiet(), local_tasks(rows, limit) as manager:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        if not set(tasks) <= set(manager.all_tasks):
            manager = manager.whole()
        unknown = [task for task in tasks if task not in manager.all_tasks]
        if unknown:
            raise common.UserError(f"--tasks {','.join(unknown)}: lm-eval has none of this name (`lm-eval ls tasks`)")
        lm = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size, softmax_dtype="float32")
        if not set(tasks) <= {"hellaswag"} | ({"lambada_openai"} if rows else set()):
            common.reach_hub()
        options = {"task_manager": manager, "limit": limit, "bootstrap_iters": BOOTSTRAP}
        try:
            return lm_eval.simple_evaluate(lm, tasks=tasks, **options)
        except (OSError, RuntimeError) as error:  # an absent network or data set; one that wants to run code
            way_out = "Without a network there are hellaswag, and lambada_openai with --rows FILE"
            reason = common.first_line(error)
            raise common.UserError(
                f"--tasks {','.join(tasks)}: the data cannot be loaded ({reason}). {way_out}"
            ) from error


def summary(results: dict) -> dict:
    """{task or group: {"version": ..., metric: value, metric_stderr: value}}; a filter other than none stays named."""
    tasks = {}
    for name, metrics in results["results"].items():
        numbers = {key.removesuffix(",none"): value for key, value in metrics.items() if isinstance(value, int | float)}
        tasks[name] = {"version": results["versions"].get(name)} | numbers
    return tasks


def main() -> None:
    parser = common.parser("lm-evaluation-harness's tasks.", batch_size=8, batch_unit="requests")
    parser.add_argument("--tasks", default="hellaswag", help="names, with commas between (default: hellaswag)")
    parser.add_argument("--rows", type=Path, help="of lambada_openai, JSON lines (default: from the Hub)")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows of each task (default: all)")
    args = parser.parse_args()
    require()
    tasks = list(dict.fromkeys(task.strip() for task in args.tasks.split(",") if task.strip()))
    if not tasks:
        raise common.UserError("--tasks: names none. Give one: --tasks hellaswag")
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    version = importlib.metadata.version("lm-eval")
    print(
        f"lm-eval {version}: {', '.join(tasks)}" + (f", {args.limit:,} rows of each" if args.limit else ""), flush=True
    )
    results = evaluate(loaded, tasks, rows=args.rows, limit=args.limit, batch_size=args.batch_size)
    from lm_eval.utils import make_table

    print(f"\n{make_table(results)}")
    if results.get("groups"):
        print(make_table(results, "groups"))
    about = {"version": version, "limit": args.limit, "tasks": summary(results)}
    common.write_results(output, "lm_eval", loaded.describe() | about)


if __name__ == "__main__":
    common.run_main(main)
