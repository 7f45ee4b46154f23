"""A graph as Python source and back.

The source of a piece is its identity and all that a compile worker is given: what is not in the text cannot change the
binary. It is also plain Python that runs when pasted after `import math, operator, torch`.

    def piece(in_0: "f32[n, 256]", in_1: "f32[512, 256]"):
        linear = torch.ops.aten.linear.default(in_0, in_1)  # f32[n, 512]
        chunk = torch.ops.aten.chunk.default(linear, 2, -1)
        getitem = chunk[0]  # f32[n, 256] strides [512, 1]
        return (getitem,)
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxc._torch_build import OpOverload, is_own_file, schema
from fxc.errors import TraceError

ABBREVIATIONS: dict[torch.dtype, str] = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
DTYPES = {text: dtype for dtype, text in ABBREVIATIONS.items()}

_INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=",
    operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_AST_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
_MODULES = {"torch": torch, "math": math, "operator": operator}
_RESERVED = {*keyword.kwlist, *dir(builtins), *_MODULES, "DEVICE"}


def layout(value: torch.Tensor, written: Callable[[Any], str] = str) -> str:
    """`f32[n, 256]`, with ` strides [...]` where it is not contiguous.

    A size of 1 hides its stride: no element is ever reached by it.

    Args:
        written: how a size or stride, a number or symbolic, is written.
    """
    shape = ", ".join(map(written, value.shape))
    text = f"{ABBREVIATIONS.get(value.dtype, str(value.dtype))}[{shape}]"
    expected, step = [], 1
    for size in reversed(value.shape):
        expected.append(written(step))
        step = step * size if not (isinstance(size, int) and size == 0) else step
    strides = [written(stride) for stride in value.stride()]
    same = all(
        have == want or written(size) == "1"
        for have, want, size in zip(strides, reversed(expected), value.shape, strict=True)
    )
    return text if same else f"{text} strides [{', '.join(strides)}]"


def target_text(target: Any) -> str:
    """How a call target is written: `torch.ops.aten.add.Tensor`, `operator.mul`, `math.ceil`, `torch.sym_max`."""
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", "")
    if module in ("_operator", "operator"):
        return f"operator.{name}"
    if module == "math":
        return f"math.{name}"
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    raise TraceError(
        f"the traced graph calls {target}, which fxc cannot write down",
        "higher-order ops such as torch.cond are not supported: use tensor ops such as torch.where",
    )


def value_text(value: Any) -> str:
    """Source of a constant argument; nodes by name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, tuple):
        inner = ", ".join(map(value_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({value_text(value.start)}, {value_text(value.stop)}, {value_text(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({value.type!r})"  # the index is chosen at load
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if value is None or isinstance(value, (bool, int, float, str, complex)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise TraceError(f"the traced graph has an argument of type {type(value).__name__}, which fxc cannot write down")


def call_text(node: fx.Node, target: str | None = None) -> str:
    """The right-hand side of a node's line."""
    if node.target is operator.getitem:
        return f"{value_text(node.args[0])}[{value_text(node.args[1])}]"
    if node.target in _INFIX and len(node.args) == 2:
        return f"{value_text(node.args[0])} {_INFIX[node.target]} {value_text(node.args[1])}"
    arguments = [value_text(arg) for arg in node.args] + [f"{k}={value_text(v)}" for k, v in node.kwargs.items()]
    return f"{target or target_text(node.target)}({', '.join(arguments)})"


def comment(node: fx.Node) -> str:
    """`  # f32[n, 256]` for a node that makes a tensor, with the names of the dimensions."""
    text = node.meta.get("layout")
    return f"  # {text}" if text else ""


def print_graph(graph: fx.Graph, name: str, source_lines: bool = False) -> str:
    """`def name(...)` with one line per node; with `source_lines`, a comment wherever the model's line changes."""
    parameters, body = [], []
    last = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            parameters.append(f'{node.name}: "{node.meta["layout"]}"')
        elif node.op == "call_function":
            line = source_line(node) if source_lines else ""
            if line and line != last:
                body.append(f"    # {line}")
                last = line
            body.append(f"    {node.name} = {call_text(node)}{comment(node)}")
        elif node.op == "output":
            body.append(f"    return {value_text(node.args[0])}")
        else:
            raise TraceError(f"the traced graph has a {node.op} node {node.name!r}, which fxc cannot write down")
    inside = ", ".join(parameters)
    if len(inside) > 100:
        inside = "\n    " + ",\n    ".join(parameters) + ",\n"
    return f"def {name}({inside}):\n" + "\n".join(body) + "\n"


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


def source_line(node: fx.Node) -> str:
    """`tiny_llama.py:41 in forward: return self.down(...)`: the innermost line of the model outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line, function, code in reversed(frames):
        if not is_own_file(file):
            return f"{file.rsplit('/', 1)[-1]}:{line} in {function}: {code.strip()}"
    return ""


def rename(graph: fx.Graph, prefix: str = "in") -> None:
    """Give nodes names that depend on structure alone: `in_0`, `linear`, `linear_1`."""
    counts: dict[str, int] = {}
    placeholders = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            node.name = node.target = f"{prefix}_{placeholders}"
            placeholders += 1
        elif node.op == "call_function":
            target = node.target
            base = schema(target).name.split("::")[-1] if isinstance(target, OpOverload) else target.__name__
            base = base.strip("_") or "op"
            count = counts.get(base, 0)
            counts[base] = count + 1
            node.name = f"{base}_{count}" if count or base in _RESERVED else base


def parse_graph(text: str) -> tuple[fx.Graph, list[str]]:
    """The graph of one printed function, and the layouts of its placeholders. The inverse of `print_graph`."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    noted = dict(_NOTED.findall(text))
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    layouts = []
    for argument in function.args.args:
        assert isinstance(argument.annotation, ast.Constant)
        nodes[argument.arg] = graph.placeholder(argument.arg)
        nodes[argument.arg].meta["layout"] = argument.annotation.value
        layouts.append(str(argument.annotation.value))
    for statement in function.body:
        if isinstance(statement, ast.Return):
            assert statement.value is not None
            graph.output(_value(statement.value, nodes))
        else:
            assert isinstance(statement, ast.Assign)
            assert isinstance(statement.targets[0], ast.Name)
            target, args, kwargs = _call(statement.value, nodes)
            name = statement.targets[0].id
            nodes[name] = graph.create_node("call_function", target, args, kwargs, name=name)
            nodes[name].meta["layout"] = noted.get(name)
    return graph, layouts


_NOTED = re.compile(r"^ +(\w+) = .*  # (\w+\[.*\])$", re.MULTILINE)
"""A node and the layout that stands behind it."""


def _call(expression: ast.expr, nodes: dict[str, fx.Node]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if isinstance(expression, ast.Subscript):
        return operator.getitem, (_value(expression.value, nodes), _value(expression.slice, nodes)), {}
    if isinstance(expression, ast.BinOp):
        args = (_value(expression.left, nodes), _value(expression.right, nodes))
        return _AST_OPERATORS[type(expression.op)], args, {}
    if isinstance(expression, ast.Compare):
        args = (_value(expression.left, nodes), _value(expression.comparators[0], nodes))
        return _AST_OPERATORS[type(expression.ops[0])], args, {}
    assert isinstance(expression, ast.Call)
    return (
        _attribute(expression.func),
        tuple(_value(arg, nodes) for arg in expression.args),
        {str(item.arg): _value(item.value, nodes) for item in expression.keywords},
    )


def _attribute(expression: ast.expr) -> Any:
    if isinstance(expression, ast.Name):
        return _MODULES[expression.id]
    assert isinstance(expression, ast.Attribute)
    return getattr(_attribute(expression.value), expression.attr)


def _value(expression: ast.expr, nodes: dict[str, fx.Node]) -> Any:
    match expression:
        case ast.Constant():
            return expression.value
        case ast.Name():
            return nodes[expression.id]
        case ast.List():
            return [_value(item, nodes) for item in expression.elts]
        case ast.Tuple():
            return tuple(_value(item, nodes) for item in expression.elts)
        case ast.Dict():
            return {
                ast.literal_eval(k): _value(v, nodes)
                for k, v in zip(expression.keys, expression.values, strict=True)
                if k
            }
        case ast.UnaryOp(op=ast.USub()):
            return -_value(expression.operand, nodes)
        case ast.BinOp():  # a complex constant, 1 + 2j
            return _AST_OPERATORS[type(expression.op)](_value(expression.left, nodes), _value(expression.right, nodes))
        case ast.Call(func=ast.Name(id="slice")):
            return slice(*(_value(item, nodes) for item in expression.args))
        case ast.Call(func=ast.Name(id="float")):
            return float(ast.literal_eval(expression.args[0]))
        case ast.Call():
            return _attribute(expression.func)(*(_value(item, nodes) for item in expression.args))
        case _:
            return _attribute(expression)


_LAYOUT = re.compile(r"(?P<dtype>\w+)\[(?P<shape>.*?)\](?: strides \[(?P<strides>.*?)\])?")


def parse_layout(text: str) -> tuple[torch.dtype, list[str], list[str] | None]:
    """dtype, the sizes and (where given) the strides, as expressions of dimension names."""
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a layout: {text!r}")
    strides = match["strides"]
    return DTYPES[match["dtype"]], list(_split(match["shape"])), None if strides is None else list(_split(strides))


def _split(text: str) -> Iterable[str]:
    """Split at commas outside parentheses: expressions may hold calls such as Max(1, n)."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()
