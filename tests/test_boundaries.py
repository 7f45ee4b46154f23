"""What the modules may import and export, read from the syntax trees: an import inside a function counts too."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import fxc
from fxc import errors

ROOT = Path(__file__).parent.parent
FOLDERS = {"fxc": "fxc", "fxc.passes": "passes", "fxc.cache": "cache", "fxc.cli": "cli"}
"""Package -> folder; the first holds fxc's own modules and its other packages."""

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "errors",
        "aside convert imports yaml_text shapes target ranks spec manifest manifest_check verified capture_plan progress",
        "cache",
        "_torch_run machine records identity refs share ops runtime",
        "cubin cuda_sdk inductor_options kernels host_compiler random_inputs scalars graph_text traced region partition "
        "stitch graph_files output graph_run kernel_choice _torch_build expand guards aliases passes",
        "models model_weights trace cases jobs job_errors _worker choose try_out pool executors _ray ray_node prove rehearse piece_jobs lower rewrite "
        "virtual verification plan target_build pipeline tuning tune ready ready_ranks eager timing workload bench cost why",
        "cli",
        "__init__ __main__",
    )
)
"""Lowest first. A module imports from its own layer and from those before it."""
WITHOUT_TORCH = LAYERS[0] | LAYERS[1] | LAYERS[2]
PRIVATE_TORCH = {"fxc._torch_build", "fxc._torch_run"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def modules() -> dict[str, Path]:
    """Every module of the four packages by its installed name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] == "__init__" and len(parts) > 1:
                parts = parts[:-1]
            found[".".join((package, *parts))] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}
each_module = pytest.mark.parametrize("name", sorted(MODULES))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported; `from a import b` is both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                (node.lineno, arg.value)
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def part(name: str) -> str:
    """`fxc.cache.key` -> `cache`, the word that LAYERS uses; `fxc` itself is `__init__`."""
    return name.split(".")[1] if "." in name else "__init__"


def layer(name: str) -> int:
    for index, members in enumerate(LAYERS):
        if part(name) in members:
            return index
    raise AssertionError(f"{name} is in no layer: add {part(name)!r} to LAYERS in {Path(__file__).name}")


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything reached by attributes from torch or from what was imported from it."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update({a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in known:
                yield node.lineno, f"{known[root]}.{rest}"


OTHERS_PRIVATE = {
    "_exit", "_getframe", "_fields", "_run_exitfuncs",  # Python's
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",  # transformers'
}  # fmt: skip
"""Names with a leading underscore that modules ask of objects which are neither fxc's nor torch's."""


def own_private(trees: Iterable[ast.AST]) -> set[str]:
    """Names with a leading underscore that these modules give to something themselves."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


@functools.cache
def known_private() -> set[str]:
    """What no module has to be torch's for."""
    return own_private(TREES.values()) | OTHERS_PRIVATE


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute with a leading underscore, of objects other than self and cls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            yield node.lineno, node.attr


def is_private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))


@each_module
def test_a_module_imports_only_what_stands_before_it(name: str) -> None:
    wrong = []
    for line, imported in imports(TREES[name]):
        if imported.split(".")[0] == "fxc" and imported in MODULES and layer(imported) > layer(name):
            wrong.append(f"{MODULES[name]}:{line}: {imported}")
    assert not wrong
    assert layer(name) >= 0


@each_module
def test_imports_are_absolute_and_use_the_installed_names(name: str) -> None:
    roots = {imported.split(".")[0] for _, imported in imports(TREES[name])}
    assert not roots & {"passes", "cache", "cli", ""}


@each_module
def test_lowest_layers_do_without_torch(name: str) -> None:
    if part(name) in WITHOUT_TORCH:
        assert "torch" not in {imported.split(".")[0] for _, imported in imports(TREES[name])}


@each_module
def test_private_torch_names_are_in_three_modules(name: str) -> None:
    if name in PRIVATE_TORCH:
        return
    used = [*imports(TREES[name]), *torch_names(TREES[name])]
    assert not [f"{MODULES[name]}:{line}: {n}" for line, n in used if n.startswith("torch.") and is_private(n)]


@each_module
def test_private_attributes_of_torchs_objects_are_in_three_modules(name: str) -> None:
    """Of a module, a tensor, a node: whatever is neither fxc's own nor known to be of another library."""
    if name not in PRIVATE_TORCH:
        found = [(line, n) for line, n in private_attributes(TREES[name]) if n not in known_private()]
        assert not [f"{MODULES[name]}:{line}: {n}" for line, n in found]


@each_module
def test_nothing_is_unpickled(name: str) -> None:
    assert not PICKLES & {imported.split(".")[0] for _, imported in imports(TREES[name])}
    assert "torch.load" not in {used for _, used in torch_names(TREES[name])}


@each_module
def test_a_module_is_at_most_400_lines(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= 400


def test_the_walk_sees_what_it_should() -> None:
    tree = ast.parse(
        "import torch\nimport torch.fx as fx\nfrom torch import _dynamo\nfrom importlib import import_module\n"
        "def f():\n    import fxc.cli\n    import_module('torch._inductor')\n"
        "    return torch._C._aoti, fx._x.y, torch.__version__\n"
    )
    found = {name for _, name in imports(tree)}
    assert {"torch._dynamo", "torch._inductor", "fxc.cli"} <= found
    assert {n for _, n in torch_names(tree) if is_private(n)} == {
        "torch._C",
        "torch._C._aoti",
        "torch.fx._x",
        "torch.fx._x.y",
    }
    tree = ast.parse(
        "class A:\n    def _f(self, m):\n        self._x = m._parameters\n        return self._y, m._x, m._f, m.__dict__\n"
    )
    assert own_private([tree]) == {"_f", "_x"}
    assert {n for _, n in private_attributes(tree)} == {"_parameters", "_x", "_f"}
    assert {"fxc", "fxc.cache", "fxc.cli", "fxc.passes", "fxc.runtime"} <= {
        n.removesuffix(".__init__") for n in MODULES
    }


def test_every_package_is_installed() -> None:
    """setuptools lists packages by hand: a new folder must be added there."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(n.removesuffix(".__init__") for n, p in MODULES.items() if p.name == "__init__.py")


def test_all_is_what_is_exported() -> None:
    for name in fxc.__all__:
        assert getattr(fxc, name) is not None
    own = {name for name, value in vars(fxc).items() if str(getattr(value, "__module__", "")).startswith("fxc")}
    assert {name for name in own if not name.startswith("_")} <= set(fxc.__all__)
    assert len(set(fxc.__all__)) == len(fxc.__all__)
    assert set(fxc.__all__) <= set(dir(fxc))
    assert not {f"fxc.{name}" for name in fxc.__all__} & MODULES.keys(), "a module would take the name's place"


def test_every_error_is_exported_with_exit_code_and_hint() -> None:
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.FxcError)
    ]
    assert len(classes) >= 12
    for cls in classes:
        assert cls.__name__ in fxc.__all__
        error = cls("what", "do")
        assert (error.exit_code in (1, 2, 3, 4, 5), error.message, error.hint, error.kind) == (
            True,
            "what",
            "do",
            cls.__name__,
        )
        assert str(error) == "what"


def test_import_fxc_is_light() -> None:
    code = "import fxc, sys; fxc.FxcError; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "sympy", "transformers", "rich", "typer"} & set(done.stdout.split())
