"""Checks the content of JSON files that somebody else may have written."""

import re

COUNT = range(1 << 53)
SHA256 = re.compile("[0-9a-f]{64}")


def check(value: object, schema: object, name: str = "") -> None:
    """Raises ValueError, naming the field, if the parsed JSON `value` does not match `schema`.

    A schema is a type, None, a range of integers, a compiled pattern for strings, or a tuple of alternatives. A schema
    or the last alternative may also be nested: [schema] is for every item of a list, [schema, schema, ...] for its
    items in turn, {key: schema} for these keys of a dict, {...: schema} for all keys. A missing key counts as None.
    """
    if isinstance(schema, tuple):
        if any(_fits(value, alternative) for alternative in schema[:-1]):
            return
        schema = schema[-1]
    if isinstance(schema, dict) and isinstance(value, dict):
        for key in value if ... in schema else schema:
            check(value.get(key), schema.get(key, schema.get(...)), f"{name}.{key}".lstrip("."))
    elif isinstance(schema, list) and isinstance(value, list) and len(schema) in (1, len(value)):
        for index, item in enumerate(value):
            check(item, schema[index % len(schema)], f"{name}[{index}]")
    elif not _fits(value, schema):
        raise ValueError(f"{name or 'it'} is {'missing' if value is None else f'{value!r:.80}'}")


def _fits(value: object, schema: object) -> bool:
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, re.Pattern):
        return isinstance(value, str) and schema.fullmatch(value) is not None
    return value is schema is None or type(value) is schema or (schema is float and type(value) is int)
