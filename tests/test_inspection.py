"""``lts.explain`` and ``lts.traces`` find what was compiled, whatever they are given."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts


def test_a_compiled_function_is_reported_under_its_qualified_name():
    def loss(x):
        return x.square().sum()

    compiled = lts.compile(loss, executors=["eager"])
    compiled(torch.ones(2))
    name = "test_a_compiled_function_is_reported_under_its_qualified_name.<locals>.loss"
    assert list(lts.explain(compiled).to_dict()["steps"]) == [name] and compiled.__qualname__ == name
    assert len(lts.traces(compiled)) == 1


def test_a_compiled_module_is_reported_with_its_parameters():
    compiled = lts.compile(nn.Linear(4, 4), executors=["eager"])
    assert lts.traces(compiled) == []
    compiled(torch.ones(1, 4))
    data = lts.explain(compiled).to_dict()
    assert list(data["steps"]) == ["Linear"] and data["parameters"]["total_bytes"] == 80
    assert len(lts.traces(compiled)) == 1


def test_each_compiled_graph_has_its_list_of_traces():
    compiled = lts.compile(nn.Linear(4, 4), executors=["eager"])
    with torch.no_grad():
        compiled(torch.ones(1, 4))
    compiled(torch.ones(1, 4)).sum().backward()
    stages = [[trace.stage for trace in graph] for graph in lts.traces(compiled)]
    assert stages == [
        ["acquired", "forward", "final forward"],
        ["acquired", "joint", "forward", "backward", "final forward", "final backward"],
    ]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_its_strategy_and_the_module_give_the_same_report():
    module = Module()
    strategy = lts.ThunderStrategy(executors=["eager"])
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(8, 4), batch_size=2))
    reports = [lts.explain(x).to_dict() for x in (trainer, strategy, module)]
    assert reports[0]["steps"]["training_step"]["graphs"] == 1
    assert reports[0] == reports[1] == reports[2]
    assert len(lts.traces(trainer)) == len(lts.traces(module)) == 1


@pytest.mark.parametrize("x", [nn.Linear(1, 1), 3, None, torch.sin, Module()])
def test_what_was_never_compiled_is_an_error_that_says_what_to_pass(x):
    for function in (lts.explain, lts.traces):
        with pytest.raises(TypeError, match=f"Nothing was compiled for {type(x).__name__}: pass a Trainer or Fabric"):
            function(x)


def test_a_trainer_with_another_strategy_is_an_error_too():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(TypeError, match="Nothing was compiled for Trainer"):
        lts.explain(trainer)
