"""README and docs say what the code says: names, defaults, messages, links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import celery_awa
from celery_awa import progress_values
from celery_awa.model import JobState
from celery_awa.plugin import message
from celery_awa.runtime.checkpoint import RESERVED
from celery_awa.settings import PREFIX, Settings
from celery_awa.store import sql_files

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *DOCS.rglob("*.md"),
]
ADRS = sorted((DOCS / "adr").glob("*.md"))
PACKAGE = sorted((ROOT / "celery_awa").rglob("*.py"))

#: The design's words, but for those of later versions.
WORDS = set(
    "task job run attempt claim lease snapshot generation checkpoint heartbeat flush end stale "  # noqa: SIM905  # a sentence reads better
    "unsent slate page committed source item cursor step interrupt snooze callback stalled".split()
)


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, their headings among them."""
    lines = (line for line in text.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", without_code(text_of(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_settings_table_has_every_setting_with_its_default() -> None:
    told = {row[0]: row[1] for row in rows(section(text_of(README), "Settings"))[2:]}
    defaults = {f"`{PREFIX}{f.name}`": repr(f.default).replace("'", '"') for f in fields(Settings)}
    assert told == {name: f"`{default}`" for name, default in defaults.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_name_is_made_up(page: Path) -> None:
    settings = {PREFIX + f.name for f in fields(Settings)}
    made = "".join(text for _, _, text in sql_files.migrations())
    in_sql = set(re.findall(r"\{schema\}\.(\w+)", made))
    text = text_of(page)
    ours = settings | {message.RUN, message.FROM, "awa_migrations"} | RESERVED
    assert set(re.findall(r"\bawa_[a-z]\w*", text)) <= ours
    public = {*celery_awa.__all__, "django", "resume", "testing", "awa_migrations"} | in_sql
    assert set(re.findall(r"\bcelery_awa\.(\w+)", text)) <= public


def code_blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_quick_start_has_at_most_20_lines_and_compiles() -> None:
    blocks = code_blocks(section(text_of(README), "Quick start"))
    assert sum(len(code.splitlines()) for _, code in blocks) <= 20
    python = [code for language, code in blocks if language == "python"]
    assert python
    for code in python:
        compile(code, "README.md", "exec")


def test_the_glossary_has_every_word() -> None:
    words = {row[0] for row in rows(text_of(DOCS / "glossary.md"))}
    assert words >= WORDS


def test_the_states_are_told_with_celerys_words() -> None:
    states = rows(section(text_of(DOCS / "lifecycle.md"), "States"))[2:]
    told = {state: (table, word) for state, table, word, _ in states}
    waiting = {JobState.SCHEDULED, JobState.RETRYABLE}
    assert told == {
        state.value: (
            f"`{'scheduled_jobs' if state in waiting else 'jobs_hot'}`",
            state.celery_state,
        )
        for state in JobState
    }


def test_the_documented_forms_are_those_of_the_code() -> None:
    told = rows(section(text_of(DOCS / "progress.md"), "`update_metadata(values)`"))
    coded = rows((progress_values.__doc__ or "").replace("``", "`"))
    assert told == coded


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(adr.name[:4]) for adr in ADRS] == list(range(1, len(ADRS) + 1))


@pytest.mark.parametrize("adr", ADRS, ids=lambda adr: adr.stem)
def test_a_decision_has_all_of_its_parts(adr: Path) -> None:
    headings = re.findall(r"^#+ (.+)$", text_of(adr), re.MULTILINE)
    assert headings[0].startswith(f"{adr.name[:4]}: ")
    assert headings[1:] == ["Status", "Context", "Decision", "Consequences", "Alternatives"]


def test_code_refers_to_pages_that_exist() -> None:
    sources = [*PACKAGE, *(ROOT / "sql").rglob("*.sql")]
    named = {name for path in sources for name in re.findall(r"docs/[\w./-]*\w", text_of(path))}
    assert {"docs/adr/0003", "docs/deploy.md"} <= named
    assert [name for name in sorted(named) if not list(ROOT.glob(f"{name}*"))] == []


#: What is said through these is for whoever runs workers.
SPEAKERS = {"bugs_told", "warn", "warning", "error", "over"}
ERRORS = {
    "EmbeddedError",
    "Failed",
    "SchemaError",
    "SettingsError",
    "SlateUnavailable",
    "StoreRefused",
    "StoreUnavailable",
}


def messages(path: Path) -> Iterator[str]:
    """What a module logs or raises: the fixed parts, each by itself."""
    tree = ast.parse(text_of(path))
    named = {ast.unparse(one.targets[0]): one.value for one in tree.body if type(one) is ast.Assign}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        if called not in SPEAKERS | ERRORS:
            continue
        for part in (part for argument in call.args for part in ast.walk(argument)):
            value = named.get(part.id) if isinstance(part, ast.Name) else part
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from (plain(piece).strip(";: ") for piece in re.split("%[sd]", value.value))


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_line_that_is_logged_or_raised_is_explained(path: Path) -> None:
    explained = plain(text_of(DOCS / "troubleshooting.md"))
    unknown = {piece for piece in messages(path) if len(piece) >= 10 and piece not in explained}
    assert unknown == set()


def test_no_line_is_explained_that_nobody_logs() -> None:
    logged = [message for path in PACKAGE for message in formats(path)]
    told = re.findall(r"`(celery-awa[ :][^`]+)`", text_of(DOCS / "troubleshooting.md"))
    assert len(told) > 20
    assert [line for line in told if not any(re.match(known, line) for known in logged)] == []


def formats(path: Path) -> Iterator[str]:
    """Patterns of the log lines of a module."""
    nodes = (node for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Constant))
    for text in {node.value for node in nodes if isinstance(node.value, str)}:
        if text.startswith(("celery-awa: ", "celery-awa ")) and text != "celery-awa: %s":
            yield re.sub(r"%[sd]", ".+", re.escape(text))
    # What comes as a whole from elsewhere.
    yield "celery-awa: ((unknown )?setting )?(CELERY_)?awa_"
    yield from (f"celery-awa: {what}" for what in re.findall(r'bugs_told\("(.+)"\)', text_of(path)))
