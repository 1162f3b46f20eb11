"""What a JSON file that somebody else may have written must hold."""

import re

COUNT = range(1 << 53)
SHA256 = re.compile("[0-9a-f]{64}")


def check(value: object, schema: object, name: str = "") -> None:
    """Raises ValueError, naming the field, where `value`, as JSON has it, is not as `schema` says.

    A schema is a type, None, a range of whole numbers, a pattern for a text, or a tuple of these, of which one must fit
    and the last may also be one of the following: [schema] for every item of a list, [schema, schema, ...] for each,
    {key: schema} for these keys of a dict, {...: schema} for all of them. A key that is missing counts as None.
    """
    if isinstance(schema, tuple):
        if any(_fits(value, one) for one in schema[:-1]):
            return
        schema = schema[-1]
    if isinstance(schema, dict) and isinstance(value, dict):
        for key in value if ... in schema else schema:
            check(value.get(key), schema.get(key, schema.get(...)), f"{name}.{key}".lstrip("."))
    elif isinstance(schema, list) and isinstance(value, list) and len(schema) in (1, len(value)):
        for number, item in enumerate(value):
            check(item, schema[number % len(schema)], f"{name}[{number}]")
    elif not _fits(value, schema):
        raise ValueError(f"{name or 'it'} is {'missing' if value is None else f'{value!r:.80}'}")


def _fits(value: object, schema: object) -> bool:
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, re.Pattern):
        return isinstance(value, str) and schema.fullmatch(value) is not None
    return value is schema is None or type(value) is schema or (schema is float and type(value) is int)
