"""The documentation keeps up with the code."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("> ", ""))


def literal_parts(node: ast.expr) -> list[str]:
    """The constant parts of a message."""
    return [
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and isinstance(item.value, str) and len(item.value) > 12
    ]


def warning_texts() -> list[str]:
    texts = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "warn":
                texts += literal_parts(node.args[0])
    return texts


@pytest.mark.parametrize("text", warning_texts())
def test_every_warning_is_in_the_troubleshooting_page(text: str) -> None:
    assert words(text).strip(" .:;,(") in words((ROOT / "docs/troubleshooting.md").read_text()), (
        f"docs/troubleshooting.md does not explain the warning {text!r}"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        if not anchor:
            continue  # a picture too
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_in_the_text_are_valid(page: Path) -> None:
    for block in code_blocks(page, "python"):
        ast.parse(block)
    for block in code_blocks(page, "yaml"):
        yaml.safe_load(block)


@pytest.mark.parametrize("page", ["traces.md", "executors.md"])
def test_pages_with_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_thunder_strategy.executors import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    namespace: dict = {}
    for number, block in enumerate(code_blocks(ROOT / "docs" / page, "python")):
        file = tmp_path / f"block{number}.py"
        file.write_text(block)
        exec(compile(block, str(file), "exec"), namespace)


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert {page for entry in config["nav"] for page in entry.values()} == {page.name for page in PAGES[1:]}


def test_the_tables_of_options_name_every_option() -> None:
    import dataclasses
    import inspect

    import lightning_thunder_strategy as lts

    text = (ROOT / "docs/index.md").read_text()
    options = set(inspect.signature(lts.ThunderFSDPStrategy).parameters)
    options |= {field.name for field in dataclasses.fields(lts.CompileConfig)}
    assert options <= set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))


def test_the_table_of_what_is_tested_names_tests() -> None:
    text = (ROOT / "docs/sharding.md").read_text()
    table = text[text.index("## What is tested") :]
    named = re.findall(r"`(\w+\.py)(?:::(\w+))?`", table)
    assert len(named) > 40
    for file, test in named:
        found = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert found, f"{file} is not there"
        if test:
            assert any(re.search(rf"^(def {test}\(|{test} = )", content, re.MULTILINE) for content in found), test
