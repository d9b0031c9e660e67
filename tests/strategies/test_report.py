"""What users are told: the report at the end of ``fit``, ``lts.explain`` and ``lts.traces``."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_thunder_strategy as lts
from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import classification_data, fit, make_trainer, thunder


def test_the_report_is_printed_at_the_end_of_fit_only_if_asked_for(capsys) -> None:
    run = fit(Classifier, thunder(report=True), val=classification_data(seed=9), max_epochs=1)
    text = capsys.readouterr().out
    for part in (
        "Compile report",
        "training_step",
        "validation_step",
        "mode step: 1 graph, 0 breaks",
        "eager",
        "parameters:",
    ):
        assert part in text
    run.trainer.test(run.module, classification_data(), verbose=False)
    assert "Compile report" not in capsys.readouterr().out
    fit(Classifier, thunder(), max_epochs=1)
    assert "Compile report" not in capsys.readouterr().out


def test_explain_gives_the_figures_of_each_step() -> None:
    run = fit(Classifier, thunder(), val=classification_data(seed=9), max_epochs=1)
    run.trainer.test(run.module, classification_data(), verbose=False)
    data = lts.explain(run.trainer).to_dict()
    assert data.keys() == {"steps", "parameters", "fallbacks", "optimizers"}
    assert data["steps"].keys() == {"training_step", "validation_step", "test_step"}
    for name, step in data["steps"].items():
        assert step["graphs"] == 1 and step["graph_breaks"] == [] and step["recompiles"] == []
        assert step["mode"] == "step" and step["compile_seconds"] > 0
        assert step["compile_seconds"] == pytest.approx(sum(step["compile_stages"].values()))
        assert set(step["executors"]) == {"eager"} and step["executors"]["eager"] > 0
        assert step["collectives"] == {"forward": [], "backward": []}, name
    training, test = data["steps"]["training_step"], data["steps"]["test_step"]
    assert training["executors"]["eager"] > test["executors"]["eager"]
    size = sum(p.numel() * p.element_size() for p in run.module.parameters())
    assert data["parameters"] == {"total_bytes": size, "local_bytes": size}
    assert data["fallbacks"] == [] and data["optimizers"] == []
    assert lts.explain(run.trainer.strategy).to_dict() == lts.explain(run.module).to_dict() == data


def test_explain_names_breaks_and_recompiles() -> None:
    class Cut(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            print("cut")
            return loss * 2 if batch_idx < 2 else loss * 3

    with pytest.warns(lts.CompileWarning):
        run = fit(Cut, thunder(), max_epochs=1)
    step = run.step()
    assert [(item["file"], item["line"]) for item in step["graph_breaks"]] == [
        (__file__, Cut.training_step.__code__.co_firstlineno + 2)
    ]
    assert "print" in step["graph_breaks"][0]["reason"]
    assert "print" in step["note"]


def test_explain_and_traces_work_while_training_goes_on() -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            traces = lts.traces(trainer)
            self.seen.append((len(traces), lts.explain(pl_module).to_dict()["steps"]["training_step"]["graphs"]))

    asks = Asks()
    run = fit(Classifier, thunder(), callbacks=lambda: [asks], max_epochs=1)
    assert asks.seen == [(1, 1)] * 3
    (stages,) = lts.traces(run.trainer)
    assert [trace.stage for trace in stages][:1] == ["acquired"] and stages[-1].stage == "final backward"
    assert {"net.0.weight", "net.1.running_mean"} <= {item.origin for item in stages[0].inputs}
    assert "cross_entropy" in str(stages[0])


def test_nothing_compiled_is_said() -> None:
    with pytest.raises(TypeError, match="Nothing was compiled for Classifier"):
        lts.explain(Classifier())
    with pytest.raises(TypeError, match="Nothing was compiled for Trainer"):
        lts.traces(make_trainer("auto"))
