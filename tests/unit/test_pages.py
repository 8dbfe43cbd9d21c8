"""What the pages link to, and the files and names that they speak of, are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in (".", "docs", "benchmarks", "benchmarks/*")
    for path in sorted(ROOT.glob(f"{folder}/*.md"))
}
# Of torch, Python, hivemind, Kubernetes and shells, and nowhere in our code.
NAMES_OF_OTHERS = {
    *("AveragedModel", "batch_norm", "node_creation_hook", "swa_utils"),
    *("k_min", "timeout_after_k_min", "backward_k_min", "forward_timeout", "backward_timeout"),
    *("detect_anomalies", "register_expert_class"),
    *("set_default_executor", "enableServiceLinks", "nice", "chrt", "process_"),
}


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def links(page: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", prose(page)) if not link.startswith("http")]


def headings(file: Path) -> set[str]:
    found = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_exists(page: str) -> None:
    for link in links(page):
        file, _, heading = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    files = re.findall(r"`([\w./-]+\.(?:json|md|py))`", prose(page))
    folders = (ROOT, (ROOT / page).parent, ROOT / "moe_autograd")
    assert [file for file in files if not any((folder / file).exists() for folder in folders)] == []


@pytest.fixture(scope="module")
def known_words() -> set[str]:
    sources = [
        path
        for folder in ("moe_autograd", "experts_server", "tests", "benchmarks", "examples", "docs")
        for kind in ("py", "proto", "json")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    read = {*sources, ROOT / "pyproject.toml", ROOT / "Makefile"}
    read.discard(Path(__file__))  # it has the names of others
    code = [path.read_text(encoding="utf-8") for path in read]
    return {word for text in (*code, *map(str, sources)) for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("page", PAGES)
def test_the_names_that_a_page_has_are_those_of_the_code(page: str, known_words: set[str]) -> None:
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    named = {word for span in spans for word in re.findall(r"\b[A-Za-z_]\w+", span)}
    assert named - known_words - NAMES_OF_OTHERS == set()


@pytest.mark.parametrize(
    ("index", "folder", "kind"),
    [("docs/index.md", "docs", "*"), ("benchmarks/README.md", "benchmarks", "*/")],
)
def test_an_index_links_all_that_is_there(index: str, folder: str, kind: str) -> None:
    linked = {link.split("/")[0].split("#")[0] for link in links(index)}
    there = {path.name for path in (ROOT / folder).glob(kind)} - {"index.md", "__pycache__"}
    assert there - linked == set()


def test_the_numbers_of_the_page_of_benchmarks_are_those_of_their_own_pages() -> None:
    numbers = r"(?<![\d.,])\d[\d.,]*\d|\d"
    folder, strangers = "", []
    for row in re.findall(r"^\|(.*)\|$", PAGES["benchmarks/README.md"], flags=re.MULTILINE)[2:]:
        linked, _, measured, _ = (cell.strip() for cell in row.split("|"))
        folder = re.findall(r"\]\((\w+)/", linked)[0] if linked else folder
        own = set(re.findall(numbers, PAGES[f"benchmarks/{folder}/README.md"]))
        strangers += [f"{folder}: {number}" for number in re.findall(numbers, measured) if number not in own]
    assert strangers == []
