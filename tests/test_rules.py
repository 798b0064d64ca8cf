"""The rules of the house, read off the sources. A violation is reported as ``file:line: what is wrong``."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import diffusers
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.weights import parts
from flows.planning.plan import Settings, plan_of
from stages.registry import STAGES, module_of

ROOT = Path(__file__).parents[1]
LAYERS = ("cosmos_rl_core", "stages", "flows")
"""From the bottom up: each may import itself and what is below it."""
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MODULES = 400, 60, 12
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {"torch.load", "torch.save", "pd.read_pickle", "pandas.read_pickle"}
PICKLING_NAMES = {"weights_only", "allow_pickle", "to_pickle"}

TENSOR_FACTORIES = {
    f"torch.{name}"
    for name in (
        "zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "logspace", "eye",
        "rand", "randn", "randint", "randperm", "normal", "Generator",
    )
}  # fmt: skip

UNPICKLES = (
    "cosmos_rl_core/importers/pickled_tensors.py",
    "tests/core/importers/test_native_weights.py",
    "tests/core/rewards/test_image_reward.py",
    "tests/core/rewards/test_prepared_scorers.py",
    "tests/core/rewards/test_video_align.py",
    "tests/flows/cli/rewards/test_score_command.py",
    "tests/tiny_scorers/video_align.py",
)
"""What reads the files of others that are pickles, and the tests that write such files."""

READS_ENVIRONMENT = (
    "flows/",
    "cosmos_rl_core/storage/cache.py",
    "cosmos_rl_core/parallel/distributed.py",
    "cosmos_rl_core/parallel/devices.py",
    "cosmos_rl_core/processes.py",
    "cosmos_rl_core/rewards/_remote/client.py",
    "cosmos_rl_core/chat/service.py",
    "cosmos_rl_core/storage/s3.py",
    "stages/execution/torch_runtime.py",
    "stages/execution/runner.py",
    "stages/execution/warm/leftovers.py",
)
PARTS = "cosmos_rl_core/weights/parts.py"
NAME_MODELS = ("cosmos_rl_core/models/", "cosmos_rl_core/importers/", "cosmos_rl_core/tiny/")
TORCH_FREE = (
    "stages.contracts",
    "stages.dataset_contracts",
    "stages.artifacts.slots",
    "stages.execution.runner",
    "stages.formats.samples",
    "cosmos_rl_core.pipelines.directories",
    "cosmos_rl_core.parallel.sequence_shares",
)

pytestmark = pytest.mark.xdist_group("sources")
"""One worker parses them all."""

IMPORTER = """
import importlib, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            for frame in traceback.extract_stack()[:-1]:
                if frame.filename.startswith(sys.argv[1]) and "site-packages" not in frame.filename:
                    print(f"{frame.filename}:{frame.lineno}: {frame.line}")
        return None

sys.meta_path.insert(0, Watch())
for name in sys.argv[2:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, for rules that look at all of them one after the other."""
    return list(ast.walk(parse(path)))


def dotted(node: ast.AST) -> str:
    """The dotted name that an expression is or ends with, as in ``ast.unparse``, which takes far longer."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def modules(package: str) -> list[str]:
    """Dotted names of the modules that can be imported without running a program."""
    names = [path.relative_to(ROOT).with_suffix("").parts for path in sources(package)]
    return [".".join(parts).removesuffix(".__init__") for parts in names if parts[-1] != "__main__"]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, also through ``import_module`` with a literal beginning."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and dotted(node.func).endswith("import_module"):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def violations(paths: list[Path], check: Callable[[ast.AST], str | None]) -> list[str]:
    """``file:line: what`` for each node that ``check`` says something about."""
    return [
        f"{place(path, getattr(node, 'lineno', 1))}: {what}"
        for path in paths
        for node in nodes(path)
        if (what := check(node)) is not None
    ]


def refuse(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_imports_point_down():
    refuse(
        [
            f"{place(path, line)}: {layer} imports {name}; imports point down: flows -> stages -> cosmos_rl_core"
            for index, layer in enumerate(LAYERS)
            for path in sources(layer)
            for line, name in imports(path)
            if name.split(".")[0] in (*LAYERS[index + 1 :], "tests")
        ]
    )


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(modules("flows"), id="flows"),
        pytest.param([*TORCH_FREE, *(module_of(name) for name, s in STAGES.items() if not s.torch)], id="light stages"),
        pytest.param(
            [f"cosmos_rl_core.{kind}.{n}" for kind in plugins.KINDS for n in plugins.known(kind)], id="plugins"
        ),
    ],
)
def test_light_modules_do_not_import_torch(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    command = [sys.executable, "-c", IMPORTER, str(ROOT) + "/", *names]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, f"{ended.stderr}\n{ended.stdout}"


def test_plugins_of_one_kind_never_import_each_other():
    refuse(
        [
            f"{place(path, line)}: imports the plugin {other!r}; what plugins share belongs in {kind}/_base"
            for kind in plugins.KINDS
            for path in sources(f"cosmos_rl_core/{kind}")
            for line, name in imports(path)
            for other in plugins.known(kind)
            if other != path.relative_to(ROOT / "cosmos_rl_core" / kind).parts[0].removesuffix(".py")
            and f"{name}.".startswith(f"cosmos_rl_core.{kind}.{other}.")
        ]
    )


def test_stages_and_flows_know_no_plugin():
    refuse(
        [
            f"{place(path, line)}: imports {name}; a plugin is loaded by its name, never imported"
            for path in sources("stages", "flows")
            for line, name in imports(path)
            for kind in plugins.KINDS
            if name.startswith(f"cosmos_rl_core.{kind}.") and name.split(".")[2] in plugins.known(kind)
        ]
    )


def test_files_and_functions_are_short():
    long_files = [
        f"{place(path, lines)}: {lines} lines, at most {MAX_FILE_LINES}"
        for path in sources(*LAYERS, "tests")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]

    def too_long(node: ast.AST) -> str | None:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        return f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}" if lines > MAX_FUNCTION_LINES else None

    refuse(long_files + violations(sources(*LAYERS), too_long))


def test_test_files_have_names_of_their_own():
    """Two of one name are one module to pytest, which then collects neither."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_nothing_is_pickled():
    def pickles(node: ast.AST) -> str | None:
        if isinstance(node, ast.keyword) and node.arg in PICKLING_NAMES:
            return f"the argument {node.arg} belongs to a pickle"
        if isinstance(node, ast.Attribute) and (node.attr in PICKLING_NAMES or dotted(node) in PICKLING_CALLS):
            return f"{ast.unparse(node)} is a pickle; use safetensors, JSON or parquet"
        return None

    imported = [
        f"{place(path, line)}: imports {name}"
        for path in sources(*LAYERS, "tests")
        for line, name in imports(path)
        if PICKLERS & set(name.split(".")) or name in PICKLING_CALLS
    ]
    found = imported + violations(sources(*LAYERS, "tests"), pickles)
    refuse([line for line in found if not line.startswith(UNPICKLES)])


def test_what_unpickles_runs_nothing():
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for node in ast.walk(parse(ROOT / UNPICKLES[0]))
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load"
    ]
    assert [load.get("weights_only") for load in loads] == ["True"]


def test_every_new_tensor_names_its_device():
    def deviceless(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Call) or dotted(node.func) not in TENSOR_FACTORIES:
            return None
        if any(keyword.arg == "device" for keyword in node.keywords):
            return None
        return f"{ast.unparse(node.func)} needs device="

    imported = [
        f"{place(path, line)}: imports {name} by itself, which hides it from this rule"
        for path in sources(*LAYERS)
        for line, name in imports(path)
        if name in TENSOR_FACTORIES
    ]
    refuse(imported + violations(sources(*LAYERS), deviceless))


def test_no_error_is_swallowed():
    broad = {"Exception", "BaseException"}

    def swallows(node: ast.AST) -> str | None:
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                return "a bare except"
            silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            names = {ast.unparse(name) for name in getattr(node.type, "elts", [node.type])}
            return "an exception of any kind is dropped" if silent and names & broad else None
        if isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            return "suppresses any exception" if broad & {ast.unparse(argument) for argument in node.args} else None
        return None

    refuse(violations(sources(*LAYERS, "tests"), swallows))


def test_every_exemption_names_its_rule():
    nameless = re.compile(r"noqa(?!: [A-Z]+\d)|(pyright|type): ?ignore(?!\[\w)|pyright: (basic|off)|ruff: noqa")
    refuse(
        [
            f"{place(path, token.start[0])}: {token.string}"
            for path in sources(*LAYERS, "tests")
            # Few files have such words at all, and to take one apart takes long.
            if nameless.search(text := path.read_text(encoding="utf-8"))
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and nameless.search(token.string)
        ]
    )


def test_the_environment_is_read_at_the_doors_only():
    found = [
        f"{place(path, line)}: imports {name}"
        for path in sources(*LAYERS)
        for line, name in imports(path)
        if name in {"os.environ", "os.getenv"}
    ]

    def reads(node: ast.AST) -> str | None:
        named = isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv", "os.environb"}
        return f"{ast.unparse(node)} is for {', '.join(READS_ENVIRONMENT)} alone; pass the value in" if named else None

    found += violations(sources(*LAYERS), reads)
    refuse([line for line in found if not line.startswith(READS_ENVIRONMENT)])


def test_there_is_no_global_statement():
    refuse(violations(sources(*LAYERS, "tests"), lambda n: "a global" if isinstance(n, ast.Global) else None))


def test_every_stage_has_its_file_and_every_file_with_a_run_is_a_stage():
    found, files = [], {ROOT / f"{module_of(name).replace('.', '/')}.py": name for name in STAGES}
    for path in sources("stages"):
        runs = [n for n in parse(path).body if isinstance(n, ast.FunctionDef) and n.name == "run"]
        if runs and path not in files:
            found.append(f"{place(path, runs[0].lineno)}: has run(), but no contract is its stage's")
        if path in files and [[a.arg for a in n.args.args] for n in runs] != [["request", "context"]]:
            found.append(f"{place(path, 1)}: the stage {files[path]!r} needs a function run(request, context)")
    missing = [f"{path.relative_to(ROOT)}:1: missing" for path in files if not path.is_file()]
    refuse(found + missing)


VLM_RECIPES = sorted((ROOT / "configs/vlm_sft").glob("*.toml"))
"""Recipes of vision-language models; tests/flows/vlm/test_shipped_vlm_recipes.py plans them on a tiny one."""
MADE = {ROOT / f"configs/tiny/{name}.toml" for name in ("vlm_sft", "edit_sft", "edit_nft", "i2v_sft", "i2v_nft")}
"""Recipes whose model a command writes; tests of their own plan them."""
OTHER_RECIPES = {*(ROOT / "configs/data").glob("*.toml"), *MADE, *VLM_RECIPES}
SHIPPED_RECIPES = sorted({*(ROOT / "configs").rglob("*.toml")} - OTHER_RECIPES)
HUB_RECIPES = [path for path in SHIPPED_RECIPES if '"package:' not in path.read_text(encoding="utf-8")]
"""Recipes of models that do not ship; tests/flows/planning/test_shipped_recipes.py plans them on tiny ones."""


@pytest.mark.parametrize("path", sorted({*SHIPPED_RECIPES} - {*HUB_RECIPES}), ids=lambda path: path.name)
def test_every_recipe_resolves(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert plan_of(Settings(recipe=str(path.relative_to(ROOT)))).prompts


def test_names_of_policy_parts_are_written_once():
    """Elsewhere they are constants of ``cosmos_rl_core/weights/parts.py``, so that a search finds who reads a part."""
    names = {parts.CURRENT, parts.OLD, parts.EMA, parts.BEHAVIOUR}

    def check(node: ast.AST) -> str | None:
        is_name = isinstance(node, ast.Constant) and node.value in names
        return f"{node.value!r} is a constant of weights/parts.py" if is_name else None  # pyright: ignore[reportAttributeAccessIssue]

    refuse(violations([p for p in sources(*LAYERS) if p != ROOT / PARTS], check))


def test_classes_of_models_are_named_by_their_plugins_alone():
    """Pipelines, transformers and VAEs of diffusers. Schedulers belong to `sampling`."""
    kinds = re.compile(r"\w+(Pipeline|Transformer[123]DModel)|Autoencoder\w+")
    classes = {name for name in dir(diffusers) if kinds.fullmatch(name)} - {"DiffusionPipeline"}

    def named(node: ast.AST) -> str | None:
        name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        return f"names {name}; ask the model's spec" if name in classes else None

    places = [path for path in sources(*LAYERS) if not str(path.relative_to(ROOT)).startswith(NAME_MODELS)]
    refuse(violations(places, named))


def test_folders_are_small():
    """Folders of plugins and of stages grow with what they hold."""
    growing = {f"cosmos_rl_core/{kind}" for kind in plugins.KINDS} | {"stages"}
    modules: dict[str, int] = Counter(
        str(path.parent.relative_to(ROOT)) for path in sources(*LAYERS) if path.name != "__init__.py"
    )
    refuse(
        [
            f"{folder}:1: {count} modules, at most {MAX_MODULES}; find the noun that some of them share"
            for folder, count in modules.items()
            if count > MAX_MODULES and folder not in growing
        ]
    )


def test_the_folder_of_stages_holds_stages():
    found = {f"stages.{path.stem}" for path in (ROOT / "stages").glob("*.py")}
    ours = {module for name in STAGES if (module := module_of(name)).count(".") == 1}
    assert found == {*ours, "stages.__init__", "stages.contracts", "stages.dataset_contracts", "stages.registry"}
