"""Plain data, as YAML or JSON gives it, to frozen structs; errors name the key, the value and the nearest valid one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from fxc.errors import SpecError, UsageError

T = TypeVar("T")


def convert(data: Any, kind: type[T], where: str) -> T:
    """`data` as a `kind`.

    Raises:
        SpecError: names `where`, the key and the value that is wrong.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise next(_faults(data, kind, ""), _Fault("", str(error))).error(where) from None


def from_json(data: bytes, kind: type[T], what: str, hint: str) -> T:
    """A `kind` from the text of a file; `what` begins each error: `mine.json is not a target record`.

    Raises:
        UsageError: it is no JSON, or a key or value is wrong, which is named.
    """
    try:
        return convert(msgspec.json.decode(data), kind, what)
    except SpecError as error:
        raise UsageError(error.message, hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{what}: {' '.join(str(error).split())}", hint) from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest in spelling, if one is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggest(word: str, known: Iterable[str], what: str) -> str:
    """A hint: the nearest known word, or all of them where none is close. `what` is their name in the plural."""
    known = list(known)
    near = nearest(word, known)
    return f"did you mean {near!r}?" if near else f"{what}: {', '.join(known)}" if known else ""


def shown(value: Any) -> str:
    """A value as one would write it in YAML, shortened to fit a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Fault(msgspec.Struct, frozen=True):
    key: str
    message: str
    hint: str = ""

    def error(self, where: str) -> SpecError:
        return SpecError(": ".join(part for part in (where, self.key, self.message) if part), self.hint)


def _faults(value: Any, kind: Any, key: str) -> Iterator[_Fault]:
    """What makes `value` no `kind`, in the order in which it stands there."""
    limits: tuple[msgspec.Meta, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        limits = tuple(part for part in rest if isinstance(part, msgspec.Meta))
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        yield from _union_faults(value, get_args(kind), key)
    elif origin is Literal:
        if isinstance(value, bool) or value not in get_args(kind):
            yield _choice_fault(value, get_args(kind), key)
    elif origin is tuple:
        yield from _list_faults(value, get_args(kind), key)
    elif origin is dict:
        if not isinstance(value, Mapping):
            yield _wrong_type(value, "a mapping", key)
        else:
            yield from _key_faults(value, key)
            for name, entry in value.items():
                yield from _faults(entry, get_args(kind)[1], _join(key, name))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _struct_faults(value, kind, key)
    elif kind is not Any:
        yield from _scalar_faults(value, kind, limits, key)


_MEANT = {
    "gpu": "cuda", "float": "float32", "fp32": "float32", "double": "float64", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16", "int": "int64", "long": "int64", "boolean": "bool",
}  # fmt: skip
"""What people write for something that is called otherwise here."""


def _choice_fault(value: Any, known: tuple[Any, ...], key: str) -> _Fault:
    names = [str(name) for name in known]
    if value is None:
        return _wrong_type(value, f"one of {', '.join(names)}", key)
    near = _MEANT.get(str(value)) if _MEANT.get(str(value)) in names else nearest(str(value), names)
    hint = "remove the quotes" if near == value and near not in known else f"did you mean {near!r}?" if near else ""
    return _Fault(key, f"{shown(value)} is not one of {', '.join(names)}", hint)


def _struct_faults(value: Any, kind: type[msgspec.Struct], key: str) -> Iterator[_Fault]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if not isinstance(value, Mapping):
        yield _wrong_type(value, f"a mapping with the keys {', '.join(fields)}", key)
        return
    yield from _key_faults(value, key)
    for name, entry in value.items():
        if name not in fields:
            yield _Fault(_join(key, name), "unknown key", suggest(name, fields, "known keys"))
        else:
            yield from _faults(entry, fields[name].type, _join(key, name))
    for name, field in fields.items():
        if field.required and name not in value:
            yield _Fault(_join(key, name), f"missing; expected {_words(field.type)}")


def _key_faults(value: Mapping[Any, Any], key: str) -> Iterator[_Fault]:
    for name in value:
        if not isinstance(name, str):
            yield _Fault(_join(key, shown(name)), f"the key {shown(name)} is {_name(name)}, expected text", "quote it")


def _list_faults(value: Any, kinds: tuple[Any, ...], key: str) -> Iterator[_Fault]:
    if not isinstance(value, list | tuple):
        yield _wrong_type(value, "a list", key, f"write [{value}]" if isinstance(value, str | int | float) else "")
    elif kinds[-1] is not ... and len(value) != len(kinds):
        yield _Fault(key, f"{shown(value)} has {len(value)} entries, expected {len(kinds)}")
    else:
        for index, entry in enumerate(value):
            yield from _faults(entry, kinds[0] if kinds[-1] is ... else kinds[index], f"{key}[{index}]")


def _union_faults(value: Any, kinds: tuple[Any, ...], key: str) -> Iterator[_Fault]:
    """The faults for the member that `value` is meant as, by its outer type."""
    if value is None and types.NoneType in kinds:
        return
    members = [kind for kind in kinds if kind is not types.NoneType]
    meant = members if len(members) == 1 else [kind for kind in members if _words(kind) == _name(value)]
    if meant:
        yield from _faults(value, meant[0], key)
    else:
        yield _wrong_type(value, _words(Union[kinds]), key)  # noqa: UP007


def _scalar_faults(value: Any, kind: Any, limits: tuple[msgspec.Meta, ...], key: str) -> Iterator[_Fault]:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        yield _wrong_type(value, _words(kind), key)
        return
    for limit in limits:
        if limit.ge is not None and value < limit.ge:
            yield _Fault(key, f"{shown(value)} is too small, expected {limit.ge} or more")
        if limit.le is not None and value > limit.le:
            yield _Fault(key, f"{shown(value)} is too large, expected at most {limit.le}")


def _wrong_type(value: Any, expected: str, key: str, hint: str = "") -> _Fault:
    if value is None:
        return _Fault(key, f"has no value, expected {expected}", "give it one or remove the key")
    if isinstance(value, str) and expected == "a whole number" and value.strip().isdigit():
        hint = "remove the quotes"
    elif expected == "text" and not isinstance(value, list | dict):
        hint = "quote it"
    return _Fault(key, f"{shown(value)} is {_name(value)}, expected {expected}", hint)


def _words(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(str(name) for name in get_args(kind))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_words(member) for member in get_args(kind) if member is not types.NoneType)
    if origin is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "a mapping"
    if origin is tuple:
        return "a list"
    names = {str: "text", int: "a whole number", float: "a number", bool: "a boolean", types.NoneType: "nothing"}
    return names.get(kind, str(kind))


def _name(value: Any) -> str:
    """The type of a value in words, the same as `_words` has for it."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    names = {str: "text", int: "a whole number", float: "a number", bool: "a boolean", types.NoneType: "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
