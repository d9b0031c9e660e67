"""Runs Lightning's own tests with Lightning's strategies and with ours, and writes what differs.

    python -m tests.conformance.run LIGHTNING_SRC --output build/conformance

``LIGHTNING_SRC`` is a checkout of https://github.com/Lightning-AI/pytorch-lightning. The baseline runs every test of
the files below. Tests that let Lightning choose a strategy of one device are then run with ``ThunderStrategy``,
compiled and not; those that ask for a DDP strategy by name with ``ThunderDDPStrategy`` and ``ThunderFSDPStrategy``. All
others do not reach a strategy of ours. A test that ends otherwise than in the baseline is run once more, with both.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from tests.conformance import plugin

ROOT = Path(__file__).parents[2]
TRAINER = "tests_pytorch"
FABRIC = "tests_fabric"


def files(folder: str, *names: str) -> list[str]:
    """Test files of a folder."""
    return [f"{folder}/test_{name}.py" for name in names]


SUITES = {
    "loops": [f"{TRAINER}/loops"],
    "trainer": [f"{TRAINER}/trainer"],
    "callbacks": [f"{TRAINER}/callbacks"],
    "checkpointing": files(
        f"{TRAINER}/checkpointing", "checkpoint_callback_frequency", "model_checkpoint", "trainer_checkpoint"
    ),
    "core": [f"{TRAINER}/core"],
    "models": files(f"{TRAINER}/models", "amp", "cpu", "fabric_integration", "hooks", "restore"),
    "tuner": [f"{TRAINER}/tuner"],
    "plugins": [f"{TRAINER}/plugins"],
    "profilers": files(f"{TRAINER}/profilers", "profiler"),
    "utilities": [
        *files(f"{TRAINER}/utilities", "all_gather_grad", "auto_restart", "combined_loader", "compile", "data"),
        *files(f"{TRAINER}/utilities", "dtype_device_mixin", "model_summary", "parsing"),
        *files(f"{TRAINER}/utilities/migration", "migration"),
    ],
    "strategies": [
        *files(f"{TRAINER}/strategies", "common", "custom_strategy", "ddp", "ddp_integration", "fsdp", "single_device"),
        *files(f"{TRAINER}/strategies/launchers", "multiprocessing"),
    ],
    "loggers": files(f"{TRAINER}/loggers", "all", "csv", "litlogger", "logger", "mlflow", "tensorboard", "wandb"),
    "others": [
        *files(f"{TRAINER}/accelerators", "common", "cpu", "gpu", "mps", "xla"),
        *files(f"{TRAINER}/overrides", "distributed"),
        *files(TRAINER, "cli"),
    ],
    "fabric": [
        *files(FABRIC, "connector", "fabric", "wrappers"),
        *files(f"{FABRIC}/strategies", "ddp_integration", "single_device", "strategy"),
        *files(f"{FABRIC}/strategies/launchers", "multiprocessing_integration"),
        *files(f"{FABRIC}/utilities", "spike"),
        f"{FABRIC}/plugins/precision",
    ],
}


@dataclass
class Runs:
    """Runs tests and keeps the last outcome of each in a folder, one file for each kind of strategy."""

    source: Path
    output: Path
    timeout: float

    def run(self, kind: str, paths: Sequence[str], tests: Optional[Collection[str]] = None) -> dict[str, Any]:
        """Results by test, of all tests in files and folders or of those named."""
        if tests is not None and not tests:
            return {}
        results = self._file(kind)
        kept = {test: line for test, line in self.read(kind).items() if test not in (tests or ())}
        results.write_text("".join(json.dumps(line) + "\n" for line in kept.values()))
        environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        environment.update({plugin.VARIABLE: kind, plugin.RESULTS: str(results)})
        folders = [ROOT / "src", ROOT, self.source / "tests", os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders if str(folder))
        if tests is not None:
            selected = self.output / f"{kind}.selected.json"
            selected.write_text(json.dumps(sorted(tests)))
            environment[plugin.SELECTED] = str(selected)
        # Without a level pytest collects all that torch writes down for its own tracing, which takes most of the time.
        options = ["-q", "--color=no", "--log-level=WARNING", f"--timeout={self.timeout}"]
        options += ["-p", "no:cacheprovider", "-p", "no:rerunfailures", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", "-p", plugin.__name__, *options, *paths]
        with (self.output / f"{kind}.log").open("w") as log:
            subprocess.run(command, cwd=self.source / "tests", env=environment, stdout=log, stderr=log, check=False)
        found = {test: line for test, line in self.read(kind).items() if within(test, paths)}
        if tests is not None:
            found = {test: line for test, line in found.items() if test in tests}
        programs = sum(line["programs"] for line in found.values())
        print(f"{kind}: {counted(found)}; {programs} programs", flush=True)
        return found

    def compare(self, kind: str, paths: Sequence[str]) -> None:
        """Run the tests that reach a strategy of ours, and those that end otherwise once more."""
        baseline = {test: line for test, line in self.read("baseline").items() if within(test, paths)}
        tests = relevant(baseline, kind)
        found = self.run(kind, paths, tests)
        different = [test for test in tests if outcome(found, test) != outcome(baseline, test)]
        files = sorted({file_of(test) for test in different})
        self.run("baseline", files, different)
        self.run(kind, files, different)

    def read(self, kind: str) -> dict[str, Any]:
        """Results by test; of a test that ran twice the last."""
        lines = self._file(kind).read_text().splitlines() if self._file(kind).exists() else []
        return {line["test"]: line for line in map(json.loads, lines)}

    def _file(self, kind: str) -> Path:
        return self.output / f"{kind}.jsonl"


def file_of(test: str) -> str:
    """The file of a test, from the folder of all tests."""
    return test.split("::")[0].removeprefix("tests/")


def within(test: str, paths: Sequence[str]) -> bool:
    """Whether a test is in one of the files and folders."""
    file = file_of(test)
    return any(file == path or file.startswith(f"{path}/") for path in paths)


def relevant(baseline: dict[str, Any], kind: str) -> list[str]:
    """The tests that a kind of strategy can change."""
    several = plugin.KINDS[kind].several
    return [test for test, line in baseline.items() if (line["several"] if several else line["single"])]


def outcome(results: dict[str, Any], test: str) -> str:
    """How a test ended; ``lost`` if its process did."""
    return results[test]["outcome"] if test in results else "lost"


def counted(results: dict[str, Any]) -> str:
    """Numbers of outcomes, in words."""
    numbers = Counter(line["outcome"] for line in results.values())
    return ", ".join(f"{numbers[each]} {each}" for each in ("passed", "failed", "skipped", "xfailed") if numbers[each])


def summary(runs: Runs) -> list[dict[str, Any]]:
    """One row for each kind of strategy and file of tests that was run with it, from all results in the folder."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    baseline = runs.read("baseline")
    for kind in plugin.KINDS:
        ours = runs.read(kind)
        ran = {file_of(test) for test in ours}
        for test in relevant(baseline, kind) if kind != "baseline" else []:
            file = file_of(test)
            if file not in ran:
                continue
            empty = {"baseline": Counter(), "ours": Counter(), "programs": 0, "different": []}
            row = rows.setdefault((kind, file), {"kind": kind, "file": file, **empty})
            first, second = outcome(baseline, test), outcome(ours, test)
            row["baseline"][first] += 1
            row["ours"][second] += 1
            row["programs"] += ours.get(test, {}).get("programs", 0)
            if first != second:
                reason = ours.get(test, {}).get("reason", "")
                row["different"].append({"test": test, "baseline": first, "ours": second, "reason": reason})
    return [rows[key] for key in sorted(rows)]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, then for each kind its sum and each difference with the first line of its reason."""
    text = ["| strategy | file | baseline passed / failed / skipped | ours | programs |", "|---|---|---|---|---|"]
    text += [_table_row(row["kind"], f"`{row['file']}`", [row]) for row in rows]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    text += [_table_row(kind, "all", [row for row in rows if row["kind"] == kind]) for kind in kinds]
    for kind in kinds:
        text.append(f"\n{kind}, what differs:\n")
        for each in (each for row in rows if row["kind"] == kind for each in row["different"]):
            reason = next(iter(each["reason"].splitlines()), "")
            text.append(f"- `{each['test']}`: {each['baseline']}, ours {each['ours']}: {reason}")
    return "\n".join(text) + "\n"


def _table_row(kind: str, file: str, rows: list[dict[str, Any]]) -> str:
    outcomes = ("passed", "failed", "skipped")
    theirs, ours = (
        " / ".join(str(sum(row[who][each] for row in rows)) for each in outcomes) for who in ("baseline", "ours")
    )
    return f"| `{kind}` | {file} | {theirs} | {ours} | {sum(row['programs'] for row in rows)} |"


def main() -> None:
    """Run what is asked for and write ``conformance.json`` and ``conformance.md``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of Lightning")
    parser.add_argument("--output", type=Path, default=Path("build/conformance"), help="folder for results")
    parser.add_argument("--kinds", nargs="*", choices=list(plugin.KINDS), default=list(plugin.KINDS))
    parser.add_argument("--suites", nargs="*", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--paths", nargs="*", default=None, help="other files and folders, instead of suites")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one test")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.source.resolve(), args.output.resolve(), args.timeout)
    paths = args.paths or [path for suite in args.suites for path in SUITES[suite]]
    for kind in args.kinds:
        if kind == "baseline":
            runs.run(kind, paths)
        else:
            runs.compare(kind, paths)
    rows = summary(runs)
    (args.output / "conformance.json").write_text(json.dumps(rows, indent=1))
    (args.output / "conformance.md").write_text(markdown(rows))
    print(f"{sum(len(row['different']) for row in rows)} tests differ: {args.output / 'conformance.md'}")


if __name__ == "__main__":
    main()
