"""What the Hub asks of a model card's metadata (huggingface/hub-docs, modelcard.md), as far as can be told offline."""

import re

import yaml

from recipe.catalog import LICENSES

KNOWN = {
    "language",
    "license",
    "license_name",
    "license_link",
    "library_name",
    "pipeline_tag",
    "tags",
    "datasets",
    "metrics",
    "base_model",
    "model-index",
}
REPO = r"[\w.-]+(/[\w.-]+)?"


def problems(card: str) -> list[str]:
    """What is wrong with a card's YAML; empty if nothing is."""
    block = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if not block:
        return ["no YAML block at the beginning"]
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    if not isinstance(data, dict):
        return ["the YAML is no mapping"]
    found = [f"{key} is not in the specification" for key in data.keys() - KNOWN]
    if data.get("license") not in LICENSES:
        found.append(f"license {data.get('license')!r}")
    if not re.fullmatch("[a-z]{2,3}", data.get("language", "en")):
        found.append(f"language {data['language']!r}")
    for key in ("tags", "datasets", "metrics"):
        values = data.get(key, [])
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            found.append(f"{key} is no list of names: {values!r}")
    names = [*data.get("datasets", []), data.get("base_model", "gpt2")]
    found += [f"{name!r} is no repository" for name in names if not re.fullmatch(REPO, name)]
    for model in data.get("model-index", []):
        found += [] if isinstance(model.get("name"), str) and model.get("results") else ["model-index lacks a name"]
        for result in model.get("results", []):
            found += _result(result)
    return found


def _result(result: dict) -> list[str]:
    required = {"task": {"type"}, "dataset": {"type", "name"}}
    allowed = {
        "task": {"type", "name"},
        "dataset": {"type", "name", "config", "split", "revision", "args"},
        "source": {"name", "url"},
    }
    found = [f"a result has {key}" for key in result.keys() - allowed.keys() - {"metrics"}]
    for part, names in allowed.items():
        values = result.get(part, {})
        found += [f"{part} has {key}" for key in values.keys() - names]
        found += [f"{part} lacks {key}" for key in required.get(part, set()) - values.keys()]
        found += [f"{part}.{key} is {v!r}" for key, v in values.items() if key != "args" and not isinstance(v, str)]
    if not result.get("metrics"):
        found.append("a result without metrics")
    for metric in result.get("metrics", []):
        found += [f"a metric has {key}" for key in metric.keys() - {"type", "value", "name", "config", "args"}]
        if not isinstance(metric.get("type"), str) or not isinstance(metric.get("value"), (int, float)):
            found.append(f"the metric {metric!r}")
    return found
