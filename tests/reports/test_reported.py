"""Faults that users have reported of other projects, each with the right behaviour here.

``docs/reports.md`` lists them all; those that other tests cover are not repeated here.
"""

import copy
import csv
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, StochasticWeightAveraging, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from tests.compiler.parity import check_module, eager_compiled
from tests.strategies.modules import Classifier
from tests.strategies.training import assert_same_state, classification_data, fit, make_trainer, thunder

ROOT = Path(__file__).parent.parent.parent


def test_buffer_made_in_the_first_call_is_dropped() -> None:  # lightning-thunder#1951
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.noise is None:
                self.noise = torch.randn(3)
            return x * self.noise

    x = torch.randn(2, 3, requires_grad=True)
    compiled = check_module(Late, [(x,), (x,), (x,)])
    first = compiled.noise.clone()
    compiled(x)
    assert torch.equal(compiled.noise, first), "drawn once"


def test_recompile_time_explodes_with_eight_shapes() -> None:  # pytorch#174704, pytorch#140229
    compiled = eager_compiled(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()), fullgraph=False)
    for rows in (3, 5, 7, 8, 9, 12, 17, 31):
        compiled(torch.randn(rows, 4)).sum().backward()
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert step["graphs"] == 2 and step["compile_seconds"] > 0


def test_traces_are_not_picklable() -> None:  # lightning-thunder#993, PR#942
    compiled = eager_compiled(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    result = compiled(x)
    for trace in lts.traces(compiled)[0]:
        again = pickle.loads(pickle.dumps(trace))
        assert str(again) == str(trace) and again.inputs == trace.inputs
    acquired = pickle.loads(pickle.dumps(lts.traces(compiled)[0][0]))
    values = [
        x if item.kind == "argument" else dict(compiled.named_parameters())[item.origin] for item in acquired.inputs
    ]
    assert torch.equal(acquired.run(*values)[0], result)


def test_prefix_of_compilation_in_checkpoint_keys(tmp_path: Path) -> None:  # lightning#17415, #20233, nanoGPT#325
    run = fit(Classifier, thunder(), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "ours.ckpt")
    plain = Classifier.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert list(plain.state_dict()) == list(Classifier().state_dict())
    assert_same_state(plain, run.module)
    eager = fit(Classifier, "auto", max_epochs=1)
    eager.trainer.save_checkpoint(tmp_path / "eager.ckpt")
    resumed = fit(Classifier, thunder(), max_epochs=2, ckpt_path=tmp_path / "eager.ckpt")
    assert resumed.trainer.current_epoch == 2


def test_checkpoint_fails_to_load_for_test_and_fit_after_fit(tmp_path: Path) -> None:  # lightning#20373, #18971
    for kind in ("full", "sharded"):
        here = tmp_path / kind
        callback = lambda here=here: [ModelCheckpoint(here, save_last=True, monitor="train_loss")]  # noqa: E731
        run = fit(
            Classifier, thunder(state_dict_type=kind), callbacks=callback, enable_checkpointing=True, max_epochs=2
        )
        before = copy.deepcopy(run.module.state_dict())
        (tested,) = run.trainer.test(run.module, classification_data(), ckpt_path="best", verbose=False)
        assert tested["test_loss"] > 0
        run.trainer.save_checkpoint(here / "after test.ckpt")
        run.trainer.fit_loop.max_epochs = 3
        run.trainer.fit(run.module, classification_data(), ckpt_path=here / "last.ckpt")
        assert run.trainer.current_epoch == 3
        assert any(not torch.equal(value, before[key]) for key, value in run.module.state_dict().items())


def test_weight_averaging_then_test_cannot_copy_the_module() -> None:  # lightning#7505
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lts.CompileWarning)
        run = fit(
            Classifier, thunder(), callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], max_epochs=3
        )
        (ours,) = run.trainer.test(run.module, classification_data(), verbose=False)
    twin = copy.deepcopy(run.module)
    with torch.no_grad():
        run.module.net[0].weight.zero_()
    (theirs,) = make_trainer("auto").test(twin, classification_data(), verbose=False)
    assert ours == theirs, "the copy has weights of its own"


def test_trainer_of_the_other_package_takes_it_silently() -> None:  # ray#40401, ray#47089, ray#39715
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match="strategy"):
        other.Trainer(strategy=lts.ThunderStrategy(executors=["eager"]), accelerator="cpu", logger=False)


def test_throughput_monitor_spams_warnings_or_goes_backwards(tmp_path: Path) -> None:  # lightning#21450, #20235
    said = {}
    for name, strategy in (("ours", thunder()), ("eager", "auto")):
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4)
        logger = CSVLogger(tmp_path / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Classifier, strategy, callbacks=lambda m=monitor: [m], logger=logger, log_every_n_steps=2, max_epochs=4)
        said[name] = sorted(str(item.message) for item in caught if "hroughput" in str(item.message))
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        samples = [float(value) for row in rows for key, value in row.items() if key.endswith("samples") and value]
        assert len(samples) > 2 and samples == sorted(samples), rows[:2]
    assert said["ours"] == said["eager"] and len(said["ours"]) <= 1


def test_batch_size_finder_runs_on_several_processes() -> None:  # lightning#20994
    trainer = make_trainer(lts.ThunderDDPStrategy(executors=["eager"]), callbacks=[BatchSizeFinder()])
    with pytest.raises(MisconfigurationException, match="distributed"):
        BatchSizeFinder().setup(trainer, Classifier(), "fit")


def test_compiled_step_with_logging_crashes() -> None:  # lightning#21836, #16822, #17177, #18835
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"a": loss * 2, "b": float(batch_idx)}, prog_bar=True, on_epoch=True, on_step=False)
            return loss

    ours, eager = fit(Logs, thunder()), fit(Logs, "auto")
    assert ours.step()["graphs"] == 1 and ours.step()["graph_breaks"] == []
    assert ours.trainer.callback_metrics == eager.trainer.callback_metrics
    assert isinstance(ours.trainer, L.Trainer)


# --------------------------------------------------------------------------------------------------------------- list


def rows() -> list[tuple[str, str]]:
    """Report and what the page says tests it."""
    lines = (ROOT / "docs" / "reports.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(row[0], row[2]) for row in cells if len(row) == 3 and row[0] not in ("report", "---")]


@pytest.mark.parametrize(("report", "tested"), rows())
def test_every_report_is_tested_where_the_page_says(report: str, tested: str) -> None:
    if tested.startswith("not run:"):
        return
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", tested)
    assert found, f"{report}: {tested}"
    for file, name in found:
        assert re.search(rf"^(def )?{name}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE), (
            f"{file} has no {name}"
        )


def test_the_counts_are_those_of_the_list() -> None:
    found = rows()
    gpu = sum(tested.startswith("needs a GPU:") for _, tested in found)
    other = sum(tested.startswith("not run:") for _, tested in found)
    counts = (
        f"{len(found)} reports: {len(found) - gpu - other} tested, {gpu} need a GPU, {other} are about what is not here"
    )
    for page in ("reports.md", "reliability.md"):
        assert counts in (ROOT / "docs" / page).read_text(), counts
