"""Reads what a build printed, pieces.py and transformed_code.py, without torch: for pages, not for running. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Op(NamedTuple):
    """A line of a graph."""

    name: str
    call: str
    """`linear`, `add.Tensor`, `fxc.rope`; empty for an expression of sizes."""
    arguments: str
    """As they are written."""
    layout: str
    """`f32[n, 256]`; empty for a size, a tuple, or nothing."""
    reads: tuple[str, ...]
    """Names of the nodes among the arguments."""

    @property
    def is_size(self) -> bool:
        """Whether it computes a size number."""
        return not self.layout and (not self.call or self.call.startswith(("sym_", "math.", "torch.", "operator.")))


class Graph(NamedTuple):
    """A printed function."""

    inputs: tuple[Op, ...]
    ops: tuple[Op, ...]
    returns: tuple[str, ...]
    """Names of the nodes in its result."""


class Origin(NamedTuple):
    """Where a tensor comes from that a piece is called with."""

    kind: str
    """weight, input, result, or own: what the piece writes its result into."""
    name: str
    """Of the weight or input, or of what made it: `piece_0`, `fxc::attention`."""


OWN = Origin("own", "its result")


def graphs(text: str) -> dict[str, Graph]:
    """The functions of pieces.py by name; none in a text that is no Python."""
    lines = text.splitlines()
    return {node.name: _graph(node, lines) for node in _functions(text)}


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from (node for node in body if isinstance(node, ast.FunctionDef))


def _graph(function: ast.FunctionDef, lines: list[str]) -> Graph:
    inputs = tuple(Op(arg.arg, "", "", _text(arg.annotation), ()) for arg in function.args.args)
    known = {op.name for op in inputs}
    ops: list[Op] = []
    returns: tuple[str, ...] = ()
    for statement in function.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            returns = _reads(statement.value, known)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
            noted = _LAYOUT.search(lines[statement.lineno - 1])
            ops.append(Op(name, *_call(value), noted[1] if noted else "", _reads(value, known)))
            known.add(name)
    return Graph(inputs, tuple(ops), returns)


_LAYOUT = re.compile(r"  # (\w+\[.*\])$")


def _text(annotation: ast.expr | None) -> str:
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ""


def _reads(value: ast.expr, known: set[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in _names(ast.walk(value)) if name in known))


def _call(value: ast.expr) -> tuple[str, str]:
    """What is called, and with what."""
    if isinstance(value, ast.Subscript):
        return "getitem", f"{ast.unparse(value.value)}, {ast.unparse(value.slice)}"
    if not isinstance(value, ast.Call):
        return "", ast.unparse(value)
    arguments = [ast.unparse(arg) for arg in value.args] + [ast.unparse(keyword) for keyword in value.keywords]
    target = ast.unparse(value.func).removeprefix("torch.ops.").removeprefix("aten.").removesuffix(".default")
    return target, ", ".join(arguments)


def origins(text: str) -> dict[str, list[tuple[Origin, ...]]]:
    """By step of transformed_code.py, where the arguments of each call of a compiled piece come from, in order.

    A result is named after its call, `piece_0` the first one, or after the op that made it.
    """
    weights = _weights(text)
    return {node.name: [*_calls(node, weights)] for node in _functions(text) if node.name.startswith("step_")}


def _weights(text: str) -> tuple[str, ...]:
    found = re.search(r"^WEIGHTS = (\(.*?^\)|\(\))", text, re.MULTILINE | re.DOTALL)
    value = ast.literal_eval(found[1]) if found else ()
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _calls(function: ast.FunctionDef, weights: tuple[str, ...]) -> Iterator[tuple[Origin, ...]]:
    known: dict[str, Origin] = {}
    ops: dict[str, str] = {}
    step = None
    for statement in function.body:
        match statement:
            case ast.FunctionDef():
                step = statement
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="weights")):
                known |= {name: Origin("weight", weight) for name, weight in zip(_names(names), weights, strict=False)}
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Attribute() as target):
                parts = ast.unparse(target).split(".")
                ops[alias] = "::".join(parts[2:4]) if parts[:2] == ["torch", "ops"] else ".".join(parts)
    if step is None:
        return
    known |= {argument.arg: Origin("input", argument.arg) for argument in step.args.args}
    for statement in step.body:
        targets = _names(ast.walk(statement.targets[0])) if isinstance(statement, ast.Assign) else []
        match statement:
            case ast.Assign(value=ast.Subscript(value=ast.Name(id=whole))):
                known |= dict.fromkeys(targets, known.get(whole, Origin("result", "")))
            case ast.Assign(value=ast.Call(func=ast.Name(id="empty"))):
                known |= dict.fromkeys(targets, OWN)
            case (
                ast.Assign(value=ast.Call(func=ast.Name(id=callee), args=args))
                | ast.Expr(value=ast.Call(func=ast.Name(id=callee), args=args))
            ):
                made = Origin("result", ops.get(callee, callee))
                if args and isinstance(args[0], ast.List) and re.fullmatch(r"piece_\d+", callee):
                    given = _names(args[0].elts)
                    yield tuple(known.get(name, Origin("result", "")) for name in given)
                    known |= dict.fromkeys((name for name in given if known.get(name) is OWN), made)
                known |= dict.fromkeys(targets, made)


def _names(nodes: Iterable[ast.AST]) -> list[str]:
    return [node.id for node in nodes if isinstance(node, ast.Name)]
