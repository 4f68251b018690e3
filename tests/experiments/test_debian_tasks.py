"""The Debian experiment: its tasks' labels and draws, and that it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from experiments import debian_rates, debian_report, debian_tasks, package_tasks, runs
from experiments.package_mentions import Mentions
from experiments.package_tasks import TASKS, Described, PackageTask, draw, labelled, read_described

SAMPLE = Path(__file__).parents[1] / "data" / "debian_packages.jsonl.gz"


def described(name: str, text: str = "a text", split: str = "train", **tags: list[str]) -> Described:
    return Described(name, text, "net", tags, split)  # type: ignore[arg-type]


def test_names_are_tagged_and_common_words_are_not() -> None:
    every = [
        ("file", "determines the type of a thing"),
        ("archive-tool", "puts a file into an archive"),
        ("editor", "changes a file"),
        ("gkrellm", "monitors the system"),
        ("gkrellm-doc", "documentation for GKrellM (HTML)"),
        ("gnome-terminal", "shows a shell"),
        ("gnome", "a desktop"),
        ("libfoo2", "a library"),
    ]
    mentions = Mentions(every)
    assert mentions.tags(["docs", "of", "GKrellM,", "and", "a", "file"]) == ["O", "O", "B-PKG", "O", "O", "O"]
    assert mentions.tags(["needs", "(libfoo2)", "and", "GNOME", "terminal"]) == ["O", "B-PKG", "O", "B-PKG", "I-PKG"]


def test_a_package_with_several_values_has_several_labels_or_none() -> None:
    packages = [
        described("a", use=["viewing", "editing", "other"]),
        described("b", use=["other"]),
        described("c", uitoolkit=["gtk", "qt"]),
        described("d", uitoolkit=["qt"]),
    ]
    assert [example.label for _, example in labelled(packages, TASKS["purpose"])] == [["viewing", "editing"]]
    assert [example.label for _, example in labelled(packages, TASKS["toolkit"])] == ["qt"]


def test_draws_keep_sides_apart_and_teach_every_label_that_is_tested() -> None:
    rng = np.random.default_rng(0)
    packages = [
        described(str(at), f"text {at}", "train" if at % 5 else "test", use=[str(rng.choice(["a", "b", "c"]))])
        for at in range(200)
    ]
    packages += [described("last", "text of a rare one", use=["d"]), described("odd", "test only", "test", use=["e"])]
    task = PackageTask("single-label", "use", ("a", "b", "c", "d", "e"))
    data, again = (draw(packages, task, 40, 30, seed) for seed in (0, 1))
    assert (len(data.train), len(data.chosen_by), len(data.test)) == (40, 5, 30)
    assert {example.label for example in data.train} == {"a", "b", "c", "d"}
    assert not {each.text for each in data.train} & {each.text for each in (*data.chosen_by, *data.test)}
    assert data.test == again.test
    assert data.train != again.train


def test_the_sample_serves_where_there_is_no_index() -> None:
    packages = read_described(SAMPLE)
    assert len(packages) == 2000
    assert all(len(labelled(packages, TASKS[name])) > 100 for name in ("topic", "role", "mentions"))


@pytest.mark.filterwarnings("ignore:A single label was found")  # among the four texts that choose the epoch
def test_a_run_goes_on_and_is_reported(shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"a": "library python", "b": "game music"}
    monkeypatch.setattr(
        package_tasks,
        "read_packages",
        lambda: (_ for _ in ()).throw(AssertionError("the index is not needed")),
    )
    source = tmp_path / "packages.jsonl"
    records: list[dict[str, Any]] = [
        {
            "name": str(at),
            "text": f"{words[label]} {at % 7}",
            "section": {"a": "web", "b": "mail"}[label],
            "tags": {},
            "split": "test" if at % 5 == 0 else "train",
        }
        for at, label in enumerate("ab" * 40)
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in records))
    out = tmp_path / "runs.jsonl"

    def run(methods: str, **more: object) -> None:
        options = {"tasks": "topic", "seeds": "0", "train": 32, "test": 16, "epochs": 1, "max_length": 8} | more
        debian_tasks.run(out, methods=methods, packages=source, backbone=str(shallow_folder), **options)  # type: ignore[arg-type]

    run("full,frozen", budget_minutes=0.0)
    assert not out.exists()
    run("full,frozen", budget_minutes=None)
    first = out.read_text()
    out.write_text(first + '{"task": "top')  # killed while it wrote
    run("full,frozen,bitfit", budget_minutes=None)
    assert out.read_text().startswith(first)
    lines = runs.read_lines(out)
    assert [line["method"] for line in lines] == ["full", "frozen", "bitfit"]
    assert lines[0]["bytes"] > lines[2]["bytes"] > lines[1]["bytes"]
    assert lines[0]["parameters"] > lines[2]["parameters"] > lines[1]["parameters"] == 0
    with pytest.raises(typer.BadParameter, match="another file"):
        run("full", budget_minutes=None, train=16)
    source.write_text(source.read_text().replace("game music 1", "game music 2"))
    with pytest.raises(typer.BadParameter, match="another file"):
        run("full", budget_minutes=None)
    found = debian_report.summary(lines)
    assert found["full"]["relative"] == 1
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\nold\n".join(debian_report.MARKS) + "\nafter\n")
    debian_report.report(out, page, tmp_path / "summary.json")
    assert "| bitfit |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith("\nafter\n")


def test_rates_are_tried_on_the_training_side_and_go_on(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        {"name": str(at), "text": f"{'game' if at % 2 else 'library'} {at}", "section": "net", "split": "train"}
        | {"tags": {"implemented-in": ["c" if at % 2 else "python"]}}
        for at in range(60)
    ]
    source = tmp_path / "packages.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in records))
    low, high = debian_tasks.Rates(1e-4), debian_tasks.Rates(1e-2)
    monkeypatch.setattr(debian_rates, "TRIED", ("language",))
    monkeypatch.setattr(debian_rates, "SETTINGS", debian_tasks.Settings(str(shallow_folder), 16, 1, 1, 32, 8))
    monkeypatch.setattr(debian_rates, "HELD_OUT", 20)
    out = tmp_path / "rates.jsonl"
    for candidates in ((low,), (low, high)):
        monkeypatch.setattr(debian_rates, "CANDIDATES", {"bitfit": candidates})
        debian_rates.main(out, packages=source, backbone=str(shallow_folder))
    lines = runs.read_lines(out)
    assert [line["rates"]["own"] for line in lines] == [1e-4, 1e-2]
    assert lines[0]["settings"] == lines[1]["settings"]
    lines[0]["score"] = 2
    written = debian_rates.table(lines)
    assert f"| bitfit | 0.0001 | {low.head} | 200.0 | **200.0** |" in written
    assert f"| bitfit | 0.01 | {low.head} | {100 * lines[1]['score']:.1f} | {100 * lines[1]['score']:.1f} |" in written
