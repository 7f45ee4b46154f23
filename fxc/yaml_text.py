"""YAML as model.yaml uses it: plain data, no key twice, `1e-5` a number."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from fxc.convert import shown
from fxc.errors import SpecError

VALUES = 100_000
"""As many can stand in a document."""


def read(text: str, where: str) -> Any:
    """The one document in `text`; None where there is none.

    Raises:
        SpecError: names `where` and, where it is known, line and column.
    """
    import yaml  # here, since a server that loads a program reads no YAML

    try:
        document = yaml.load(text, Loader=_loader())
        size = _size(document, where, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise SpecError(f"{where}:{place} {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2020-99-99 as a date
        raise SpecError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply") from None
    if size > VALUES:
        raise SpecError(f"{where}: {size} values, aliases counted at each use, expected at most {VALUES}")
    return document


def _size(value: Any, where: str, known: dict[int, int]) -> int:
    """Values in it, what an alias stands for counted at each use, but for one inside itself.

    Raises:
        SpecError: some text in it is none.
    """
    if isinstance(value, str) and not is_text(value):
        raise SpecError(f"{where}: {shown(value)} is not text: half of a surrogate pair")
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 1
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(entry, where, known) for entry in entries)
    return known[id(value)]


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_plain(value: Any, key: str, where: str, depth: int = 0) -> None:
    """Refuse what JSON cannot say, so that the record of a build tells all that went into it.

    Raises:
        SpecError: names `where`, the key and the value.
    """
    if depth > 32:
        raise SpecError(f"{where}: {key.split('.')[0]}: nested too deeply, expected at most 32 levels")
    if isinstance(value, dict):
        for name, entry in value.items():
            if not isinstance(name, str):
                raise SpecError(f"{where}: {key}: the key {shown(name)} is not text", "quote it")
            check_plain(entry, f"{key}.{name}", where, depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            check_plain(entry, f"{key}[{index}]", where, depth + 1)
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise SpecError(f"{where}: {key}: {value} is a {type(value).__name__}, expected plain data", "quote it")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{where}: {key}: {value} is not a finite number", "pass it as text")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(f"{where}: {key}: {shown(value)} does not fit 64 bits", "quote it")


@functools.cache
def _loader() -> Any:
    """SafeLoader that refuses a key that stands twice in one mapping."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for name, _ in node.value:
                if isinstance(name, yaml.ScalarNode) and name.value in seen:
                    problem = f"the key {name.value!r} stands there twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
                seen.add(str(name.value))
            return node

    # YAML 1.1, which PyYAML follows, reads 1e-5 as text; everyone means the number.
    number = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader
