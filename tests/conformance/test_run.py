"""The runner of Lightning's own tests: strategies are replaced, what differs is found."""

import json
from pathlib import Path
from typing import Any

from tests.conformance import run as conformance

LIGHTNINGS_TEST = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def test_fit():
    trainer = Trainer(max_steps=1, limit_val_batches=0, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(BoringModel())
    assert type(trainer.strategy).__name__ == "ThunderStrategy"


def test_named():
    assert type(Trainer(strategy="ddp_spawn", accelerator="cpu").strategy).__name__ == "DDPStrategy"


def test_not_selected():
    assert False
"""


def line(test: str, outcome: str, **counts: int) -> dict[str, Any]:
    return {"test": f"tests/a.py::{test}", "outcome": outcome, "reason": "why\nmore", "single": 0, "several": 0,
            "programs": 0, **counts}  # fmt: skip


def write(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_a_test_of_lightnings_runs_with_our_strategy(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_trainer.py").write_text(LIGHTNINGS_TEST)
    (tmp_path / "pytest.ini").touch()
    runs = conformance.Runs(tmp_path, tmp_path, 60)
    selected = [f"tests/test_trainer.py::{name}" for name in ("test_fit", "test_named")]
    found = runs.run("thunder", ["test_trainer.py"], selected)
    assert [line["outcome"] for line in found.values()] == ["passed", "passed"], found
    assert [(line["single"], line["several"], line["programs"]) for line in found.values()] == [(1, 0, 1), (0, 1, 0)]


def test_differences_are_counted_by_file_and_kind(tmp_path: Path) -> None:
    base = [line("one", "passed", single=1), line("two", "passed", single=2), line("crashed", "passed", single=1)]
    write(tmp_path, "baseline", *base, line("spawned", "passed", several=1), line("none", "failed"))
    write(tmp_path, "thunder", line("one", "passed", programs=3), line("two", "failed"))
    write(tmp_path, "thunder-fsdp", line("spawned", "failed"), line("spawned", "passed"))  # the second time
    rows = conformance.summary(conformance.Runs(tmp_path, tmp_path, 1))
    assert [(row["kind"], row["file"], row["programs"]) for row in rows] == [
        ("thunder", "a.py", 3), ("thunder-fsdp", "a.py", 0),
    ]  # fmt: skip
    assert dict(rows[0]["baseline"]) == {"passed": 3}
    assert dict(rows[0]["ours"]) == {"passed": 1, "failed": 1, "lost": 1}
    assert [each["test"] for each in rows[0]["different"]] == ["tests/a.py::two", "tests/a.py::crashed"]
    assert rows[1]["different"] == []
    text = conformance.markdown(rows)
    assert "| `thunder` | `a.py` | 3 / 0 / 0 | 1 / 1 / 0 | 3 |" in text
    assert "- `tests/a.py::two`: passed, ours failed: why\n" in text
