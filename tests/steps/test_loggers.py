"""Steps that call loggers themselves log what eager training logs."""

from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.strategies.modules import Linear
from tests.strategies.training import assert_same_training, compile_warnings, fit, thunder


class CallsLogger(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        if isinstance(self.logger, CSVLogger):
            self.logger.experiment.log_metrics({"own": float(loss)}, step=batch_idx)
            self.logger.log_metrics({"tensor": loss.detach(), "index": batch_idx}, step=self.global_step)
        for logger in self.loggers:
            logger.save()
        return loss


class CallsLoggerInCutStep(CallsLogger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("here")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make, messages_expected", [(CallsLogger, 0), (CallsLoggerInCutStep, 1)])
def test_calls_of_loggers_write_what_eager_writes(make, messages_expected, tmp_path) -> None:
    def run(name: str, strategy: Any) -> Any:
        return fit(make, strategy, logger=CSVLogger(tmp_path / name), max_epochs=5, log_every_n_steps=1)

    with compile_warnings() as messages:
        ours, eager = run("ours", thunder()), run("eager", "auto")
    assert_same_training(ours, eager)
    assert len(messages) == messages_expected, messages
    one, other = (tmp_path / name / "lightning_logs" / "version_0" / "metrics.csv" for name in ("ours", "eager"))
    assert one.read_text() == other.read_text() and "own" in one.read_text()
    assert type(ours.trainer.logger) is CSVLogger
    assert ours.step()["mode"] == "step"
    if not messages_expected:
        assert (ours.step()["graphs"], ours.step()["graph_breaks"]) == (1, [])
