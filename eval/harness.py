"""lm-evaluation-harness on a model: `python -m eval.harness MODEL --tasks lambada_openai,wikitext [--limit N]`.

Tasks are the harness's own and those of --include_path; log-probabilities are in float32 whatever the model's dtype.
"""

import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

from eval import common
from eval.scores import score
from recipe.utils.errors import first_line


def evaluate(
    loaded: common.Loaded, tasks: list[str], *, batch_size: int, limit: int | None = None, include: Path | None = None
) -> dict:
    """The output of lm_eval.simple_evaluate, "samples" included. `limit` is in rows per task; `include` is a directory
    with the YAML files of more tasks. Raises UserError for an unknown task, OSError for data that cannot be loaded."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    if include and not os.path.isdir(include):
        raise common.UserError(f"--include_path {include}: no such directory")
    os.environ["DISABLE_MULTIPROC"] = "1"  # otherwise lm-eval forks a process pool for seconds of work
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=include)
    if unknown_tasks := [task for task in tasks if task not in manager.all_tasks]:
        raise common.UserError(f"--tasks {','.join(unknown_tasks)}: lm-eval has no such task (`lm-eval ls tasks`)")
    common.go_offline_if_unreachable()  # so that cached data load at once
    model, tokenizer = loaded.model, loaded.tokenizer
    lm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32", trust_remote_code=False)
    # Bootstrap resamples are for metrics whose error has no closed form; the default of 100,000 takes minutes.
    try:
        return lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=1000)
    except AssertionError as error:  # as for a text that is longer than the model's positions
        reason = f"lm-eval refuses a model of {loaded.n_positions} positions: {first_line(error)}"
        raise common.UserError(f"--tasks {','.join(tasks)}: {reason}") from error


def scores_of(results: dict, method: str, limit: int | None) -> list[dict]:
    """The scores in the output of `evaluate`; a metric's name includes its filter unless that is none."""
    url = "https://github.com/EleutherAI/lm-evaluation-harness"
    source = {"source_name": "lm-evaluation-harness", "source_url": url, "complete": not limit}
    scores = []
    for task, metrics in results["results"].items():
        rows = f", {metrics['sample_len']:,} rows" if "sample_len" in metrics else ""
        dataset = {"dataset_type": task, "dataset_name": task}
        for key, value in metrics.items():  # "acc,none", its "acc_stderr,none", and others without a comma
            kind, comma, filter_name = key.partition(",")
            if comma and not kind.endswith("_stderr"):
                error = metrics.get(f"{kind}_stderr,{filter_name}")
                ci95 = 1.96 * error if isinstance(error, float) else None  # else N/A
                name = kind if filter_name == "none" else f"{kind} ({filter_name})"
                metric = "accuracy" if kind.startswith("acc") else kind, name
                scores.append(score(dataset, metric, value, method + rows, ci95=ci95, **source))
    return scores


def main() -> None:
    """Runs the tasks on one model, prints lm-eval's table and writes the results. Raises UserError."""
    parser = common.parser("Tasks of lm-evaluation-harness.", batch_size=8, batch_unit="requests")
    parser.add_argument("--tasks", default="hellaswag", help="comma-separated names (default: hellaswag)")
    parser.add_argument("--include_path", type=Path, help="directory with the YAML files of more tasks")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows of each task (default: all)")
    args = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        raise common.UserError("lm-eval is not installed: pip install -e '.[eval]' (make eval-lm does it)")
    tasks = list(dict.fromkeys(task.strip() for task in args.tasks.split(",") if task.strip()))
    if not tasks:
        raise common.UserError("--tasks names no task. Give one: --tasks hellaswag")
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    results = evaluate(loaded, tasks, batch_size=args.batch_size, limit=args.limit, include=args.include_path)
    from lm_eval.utils import make_table

    print(f"\n{make_table(results)}")
    if results.get("groups"):
        print(make_table(results, "groups"))
    version = importlib.metadata.version("lm-eval")
    record = loaded.describe() | {"version": version, "limit": args.limit, "versions": results["versions"]}
    method = f"lm-evaluation-harness {version}" + (f", limit {args.limit:,}" if args.limit else "")
    scores = scores_of(results, f"{method}, in {record['dtype']}", args.limit)
    common.write_results(output, "lm_eval", record | {"scores": scores})


if __name__ == "__main__":
    common.run_main(main)
