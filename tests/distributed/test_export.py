"""Checkpoints become files of Hugging Face and LitGPT, equal to the model that was trained."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from litgpt import GPT, Config
from litgpt.utils import load_checkpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.cli.main import main
from lightning_thunder_strategy.distributed.export import export_checkpoint

TOKENS = torch.arange(16).view(4, 4) % 7
GPT_CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "padded_vocab_size": 16, "block_size": 8}


class Holder(L.LightningModule):
    """A LightningModule as users write it: the model is one of its attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        output = self.model(batch)
        return (output if isinstance(output, torch.Tensor) else output.logits).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **options))


def trained(model: torch.nn.Module, folder: Path, state_dict_type: str) -> tuple[torch.nn.Module, Path]:
    """The model after two steps, and its checkpoint."""
    strategy = lts.ThunderStrategy(compile="off", state_dict_type=state_dict_type)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Holder(model), DataLoader(TOKENS, batch_size=2))
    trainer.save_checkpoint(folder / "trained.ckpt")
    return model, folder / "trained.ckpt"


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_loads_what_was_trained(tmp_path: Path, state_dict_type: str, tied: bool) -> None:
    model, checkpoint = trained(llama(tie_word_embeddings=tied), tmp_path, state_dict_type)
    assert main(["export", str(checkpoint), str(tmp_path / "hf"), "--to", "safetensors", "--prefix", "model."]) == 0
    model.config.save_pretrained(tmp_path / "hf")
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_litgpt_loads_what_was_trained(tmp_path: Path, state_dict_type: str) -> None:
    torch.manual_seed(0)
    model, checkpoint = trained(GPT(Config(**GPT_CONFIG)), tmp_path, state_dict_type)
    export_checkpoint(checkpoint, tmp_path / "lit", to="litgpt", prefix="model.")
    plain = GPT(Config(**GPT_CONFIG))
    load_checkpoint(L.Fabric(accelerator="cpu", devices=1), plain, tmp_path / "lit" / "lit_model.pth", strict=True)
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=0, atol=0)


def test_several_files_and_another_dtype_replace_an_earlier_export(tmp_path: Path) -> None:
    model, checkpoint = trained(llama(), tmp_path, "full")
    options: dict[str, Any] = {"to": "safetensors", "prefix": "model."}
    export_checkpoint(checkpoint, tmp_path / "hf", **options, max_shard_size="4KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    export_checkpoint(checkpoint, tmp_path / "hf", **options, dtype=torch.bfloat16)
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    model.config.save_pretrained(tmp_path / "hf")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    for name, value in model.bfloat16().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    _, checkpoint = trained(llama(), tmp_path, "full")
    (tmp_path / "hf").mkdir()
    others = ["model.fp16.safetensors", "model_ema.safetensors", "model-lora.safetensors.bak", "tokenizer.json"]
    for name in others:
        (tmp_path / "hf" / name).touch()
    export_checkpoint(checkpoint, tmp_path / "hf", to="safetensors", prefix="model.")
    assert {file.name for file in (tmp_path / "hf").iterdir()} == {"model.safetensors", *others}


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint = trained(llama(), tmp_path, "full")
    export_checkpoint(checkpoint, tmp_path / "hf", to="safetensors", prefix="model.")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()

    def full_disk(state: Any, folder: Path, **options: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", full_disk)
    assert main(["export", str(checkpoint), str(tmp_path / "hf"), "--to", "safetensors", "--prefix", "model."]) == 1
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"state_dict": {"model.weight": torch.ones(1), "other.weight": torch.ones(1)}}, tmp_path / "a.ckpt")
    torch.save({"epoch": 1}, tmp_path / "no_model.ckpt")
    stored = torch.nn.Sequential(torch.nn.Linear(64, 64))
    lts.QuantizeWeights("int4").module(stored)
    torch.save(stored.state_dict(), tmp_path / "bits.ckpt")
    torch.save({"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": Holder}, tmp_path / "code.ckpt")

    def refused(checkpoint: str, *options: str) -> str:
        assert main(["export", str(tmp_path / checkpoint), str(tmp_path / "out"), "--to", "litgpt", *options]) == 1
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "its names begin with 'model.', 'other.'" in refused("a.ckpt", "--prefix", "net.")
    assert "has no model under 'state_dict' or 'model'" in refused("no_model.ckpt")
    assert "holds weights in few bits (0.weight_codes)" in refused("bits.ckpt")
    assert "There is no checkpoint" in refused("absent.ckpt")
    assert "holds more than tensors and plain values" in refused("code.ckpt")
    (tmp_path / "empty").mkdir()
    assert "is not a checkpoint" in refused("empty")
    assert main(["export", str(tmp_path / "code.ckpt"), str(tmp_path / "out"), "--to", "litgpt", "--trust"]) == 0
    assert torch.load(tmp_path / "out" / "lit_model.pth")["weight"] == 1
    with pytest.raises(SystemExit):
        main(["export", "a", "b", "--to", "onnx"])
    with pytest.raises(ValueError, match="choose from 'safetensors', 'litgpt'"):
        export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", to="onnx")
