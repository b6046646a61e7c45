"""The documentation says what the code does: blocks run, commands parse, names exist, links resolve, generated pages are up to date."""

import ast
import importlib.util
import re
import shlex
import tomllib
from xml.etree import ElementTree

import click
import pytest
from pages import DOCS, PAGES, ROOT, anchors, blocks, commands, inline_code, links, prose

from nearpolicy import METHODS, build
from nearpolicy.check import build_method, refuse
from nearpolicy.cli import cli
from nearpolicy.config import known_keys
from nearpolicy.describe import describe
from nearpolicy.layers import recipe_names, resolve
from nearpolicy.metrics import QUANTILES, TABLE
from nearpolicy.suites import Benchmark, find_suite
from nearpolicy.sweep.experiment import Experiment, make_plan

SMALL = ["train.steps=2", "schedule.updates_per_rollout=2", "rollout.prompts=2", "rollout.group_size=2", "task.heldout=4", "device=cpu"]


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return generator()


@pytest.fixture(scope="module")
def made(generate):
    return generate.generated()


def test_generated_pages_are_what_the_code_says(generate, made):
    assert generate.differences(made) == []


def test_the_check_sees_a_stale_a_missing_and_a_left_over_page(generate, made):
    pages = dict(made)
    pages["reference/metrics.md"] += "\n"
    pages["reference/new.md"] = ""
    del pages["methods/vespo.md"]
    found = generate.differences(pages)
    assert found == ["out of date: docs/reference/metrics.md", "missing: docs/reference/new.md", "left over: docs/methods/vespo.md"]


def test_two_generations_are_equal_byte_for_byte(generate, made):
    assert generate.generated() == made


def test_figures_load_nothing_and_are_well_formed(made):
    figures = {name: text for name, text in made.items() if name.endswith(".svg")}
    assert {f"methods/img/{name}-phi.svg" for name in METHODS} <= set(figures)
    for name, text in figures.items():
        ElementTree.fromstring(text)
        assert "nan" not in text, name
        assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"], name


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.id)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = build.config_for
    # Documented runs are shortened; everything else in the block is as it stands.
    monkeypatch.setattr(build, "config_for", lambda parts, run=None: real([*parts, *SMALL], run))
    exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with the TOML files that the pages name in a block's first line."""
    for block in blocks("toml"):
        if named := re.match(r"# (\S+\.toml)\n", block.text):
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("where", "line"), commands(), ids=lambda x: x if ":" in x and " " not in x else "")
def test_commands_are_known_and_their_settings_act(where, line, files):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets, line
        return
    assert words[0] == "nearpolicy", line
    command = cli.commands[words[1]]
    with command.make_context(f"nearpolicy {words[1]}", words[2:]) as context:
        values = context.params
    if words[1] == "methods":
        assert describe(values["name"])
    if "parts" in values:
        config = build.config_for(values["parts"])
        refuse(config, build_method(config))
    if words[1] == "sweep":
        assert (ROOT / values["experiment"]).is_file() or values["experiment"].is_file(), line
    if values.get("suite") and values["suite"].suffix != ".toml":
        assert find_suite(values["suite"]).exists()


def test_a_wrong_command_would_be_seen():
    with pytest.raises(click.NoSuchOption):
        cli.commands["train"].make_context("nearpolicy train", ["--outt", "x"])


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda b: b.id)
def test_toml_blocks_are_settings_or_suites(block):
    tree = tomllib.loads(block.text)
    if "benchmark" in tree:
        for row in tree["benchmark"]:
            Benchmark.model_validate(row)
        return
    if "axis" in tree:
        assert make_plan(Experiment.model_validate(tree | {"name": "page"})).runs
        return
    config = resolve([tree])
    refuse(config, build_method(config))


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    named = set(re.findall(r":\s+([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {str(p.relative_to(DOCS)) for p in PAGES if DOCS in p.parents}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_internal_links_resolve(page):
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


SECTIONS = "model|task|rollout|schedule|method|teacher|reference|distill|ratio|advantage|train|eval|checkpoint|log"
METRICS = "reward|eval|response|policy|ratio|weight|correction|m2po|advantage|stale|relay|demonstration|distill|data|time|train"


def settings():
    options = {f"method.{name}" for row in METHODS.values() for name in row.all_options()}
    options |= {f"distill.{name}" for row in METHODS.values() if row.signal is not None for name in row.all_options()}
    return {*known_keys(), *options, "model.lora", "rollout.cut", "rollout.demonstrations"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_keys_and_metrics_named_in_the_text_exist(page):
    text = prose(page)
    if page.name == "migrating.md":  # two columns of it are other trainers' names
        text = "\n".join(line.split(" | ")[2] for line in text.splitlines() if line.startswith("| "))
    known = settings()
    for code in inline_code(text):
        key = re.fullmatch(rf"((?:{SECTIONS})(?:\.[a-z_]+)+)(?:\s?=.*)?", code)
        if key and not code.endswith((".py", ".toml", ".jsonl")):
            assert key[1] in known or any(k.startswith(f"{key[1]}.") for k in known), code
        metric = re.fullmatch(rf"((?:{METRICS})/[a-z_]\w*)((?:/\w+)?)", code)
        if metric:
            assert metric[1] in TABLE or metric[1] == "eval/unscored_frac", code
            assert metric[2].removeprefix("/") in {"", "hist", *QUANTILES}, code


def test_our_keys_in_the_migration_table_are_all_there():
    rows = [line.split(" | ") for line in prose(DOCS / "migrating.md").splitlines() if line.startswith("| ") and "our key" not in line]
    keys = {code for row in rows for code in inline_code(row[2])}
    assert len(rows) > 40
    assert keys <= {*settings(), *(k for k in known_keys() if "." not in k)}, keys - settings()


def test_every_fault_names_tests_that_exist():
    text = prose(DOCS / "faults.md")
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(r.split("|")[1]) for r in rows] == list(range(1, 21))
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named or "later" in row, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, (file, name)


def test_tests_named_elsewhere_exist():
    for page in [*PAGES, *sorted((DOCS / "notes").glob("*.md"))]:
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, (page.name, file, name)


def test_files_named_in_the_text_exist():
    for page in PAGES:
        for code in inline_code(prose(page)):
            if re.fullmatch(r"(nearpolicy|examples|docs|tests|bench)/[\w/.-]+\.(py|toml|md)", code):
                assert (ROOT / code).exists(), (page.name, code)


# Those of the papers are in tests/test_recipes.py: the papers' own settings are warned about where they are.
@pytest.mark.parametrize("name", [name for name in recipe_names() if "/" not in name])
def test_every_recipe_loads_and_can_act(name):
    config = build.config_for([name])
    assert refuse(config, build_method(config)) == []


def test_every_method_has_a_note_and_a_page():
    for name, row in METHODS.items():
        page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        for part in (row.formula, row.source, row.differences, "How to tell it works", f"img/{name}-phi.svg"):
            assert part in page, (name, part)


def test_values_beside_ours_name_options_that_exist():
    values = tomllib.loads((DOCS / "notes" / "values.toml").read_text(encoding="utf-8"))
    assert set(values) == set(METHODS)
    for name, rows in values.items():
        assert set(rows) <= {*METHODS[name].all_options(), "advantages"}, name
        assert all(len(row) == 3 for row in rows.values()), name
