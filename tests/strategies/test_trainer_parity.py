"""Training under ThunderStrategy is bit-equal to training under Lightning's own strategy (eager executor)."""

import pytest
import torch

from tests.strategies.modules import GAN, Autoencoder, Classifier, HuggingFaceLlama, LitGPT, TiedLanguageModel
from tests.strategies.training import assert_same_training, classification_data, compile_warnings, fit_both, token_data


def test_batchnorm_and_dropout_train_as_eager_in_one_program_each() -> None:
    ours, eager = fit_both(Classifier, train=classification_data(shuffle=True), val=classification_data(seed=8))
    assert_same_training(ours, eager)
    for name in ("training_step", "validation_step"):
        step = ours.step(name)
        assert (step["graphs"], step["graph_breaks"], step["recompiles"], step["mode"]) == (1, [], [], "step")


def test_short_last_batch_trains_as_eager() -> None:
    ours, eager = fit_both(Classifier, train=classification_data(samples=21), val=classification_data(samples=17))
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 2  # static shapes, then symbolic ones


@pytest.mark.parametrize("make", [LitGPT, HuggingFaceLlama])
def test_language_model_trains_as_eager_in_one_program(make) -> None:
    ours, eager = fit_both(make, train=token_data(), val=token_data())
    assert_same_training(ours, eager)
    assert (ours.step()["graphs"], ours.step()["graph_breaks"]) == (1, [])


def test_hugging_face_llama_with_fused_attention_trains_close_to_eager_in_one_program() -> None:
    # transformers passes an explicit mask instead of `is_causal` when it is being compiled: another kernel
    ours, eager = fit_both(lambda: HuggingFaceLlama("sdpa"), train=token_data())
    torch.testing.assert_close(dict(ours.module.state_dict()), dict(eager.module.state_dict()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.trainer.callback_metrics, eager.trainer.callback_metrics)
    assert (ours.step()["graphs"], ours.step()["graph_breaks"]) == (1, [])


def test_submodules_called_directly_are_compiled_and_train_as_eager() -> None:
    ours, eager = fit_both(Autoencoder)
    assert_same_training(ours, eager)
    assert (ours.step()["graphs"], ours.step()["graph_breaks"]) == (1, [])


def test_tied_embedding_trains_as_eager_and_stays_tied() -> None:
    ours, eager = fit_both(TiedLanguageModel, train=token_data())
    assert_same_training(ours, eager)
    assert ours.module.head.weight is ours.module.embedding.weight


def test_gan_with_toggled_optimizers_trains_as_eager_with_one_message() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(GAN)
    assert_same_training(ours, eager)
    assert len(messages) == 1
    assert "training_step" in messages[0] and "manual optimization" in messages[0] and "compiled" in messages[0]
    assert ours.step()["graphs"] >= 2  # the two losses, and the fragments around them
    assert all(parameter.requires_grad for parameter in ours.module.parameters())
