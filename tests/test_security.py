"""Nothing that a stranger wrote runs as code unless the user asks for it."""

import ast
import json
import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler import cache
from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.distributed.checkpoint import load_sharded, save_sharded
from lightning_thunder_strategy.strategies.storage import read_file
from tests.strategies.fabric_helpers import fabric
from tests.strategies.modules import Linear
from tests.strategies.training import classification_data, make_trainer, thunder

SOURCES = sorted(Path(lts.__file__).parent.rglob("*.py"))


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that would be there if code had run."""
    return tmp_path / "code has run"


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_file_that_holds_code_is_refused_by_default(tmp_path: Path, proof: Path) -> None:
    trainer = make_trainer(thunder(), max_epochs=1)
    trainer.fit(Linear(), classification_data())
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    torch.save({**torch.load(path, weights_only=True), "extra": Touches(proof)}, path)
    for load in (
        lambda: make_trainer(thunder()).fit(Linear(), classification_data(), ckpt_path=path),
        lambda: make_trainer(thunder()).predict(Linear(), classification_data(), ckpt_path=path),
        lambda: fabric().load(path),
        lambda: fabric().load(path, {"extra": None}),
    ):
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            load()
        assert not proof.exists()
    assert fabric().load(path, weights_only=False)["extra"] is None
    assert proof.exists(), "the user asked for it"


def sharded(folder: Path, **state: Any) -> Path:
    folder.mkdir()
    save_sharded(folder, {"state_dict": {"w": torch.ones(3), **state}}, {"epoch": 2, "names": ["a"]}, main=True)
    return folder


def load(folder: Path, weights_only: Any = None) -> tuple[dict, dict]:
    return load_sharded(folder, {"state_dict": {"w": torch.zeros(3)}}, [], weights_only)


def test_an_honest_folder_is_read(tmp_path: Path) -> None:
    state = {"steps": 3, "name": "x", "betas": (0.9, 0.99), "half": torch.ones(2, dtype=torch.bfloat16)}
    for weights_only in (None, True, False):
        found, rest = load(sharded(tmp_path / str(weights_only), **state), weights_only)
        assert found["state_dict"]["steps"] == 3 and found["state_dict"]["name"] == "x"
        assert (
            tuple(found["state_dict"]["betas"]) == (0.9, 0.99) and found["state_dict"]["half"].dtype == torch.bfloat16
        )
        assert torch.equal(found["state_dict"]["w"], torch.ones(3)) and rest == {"epoch": 2, "names": ["a"]}


@pytest.mark.parametrize("place", ["index", "value", "metadata"])
def test_a_folder_that_holds_code_is_refused_by_default(place: str, tmp_path: Path, proof: Path) -> None:
    folder = sharded(tmp_path / "model.ckpt", **({"extra": Touches(proof)} if place == "value" else {}))
    if place == "index":
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.planner_data["extra"] = Touches(proof)
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    elif place == "metadata":
        torch.save({"epoch": Touches(proof)}, folder / "meta.pt")
    proof.unlink(missing_ok=True)
    with pytest.raises(Exception, match="weights_only"):
        load(folder)
    assert not proof.exists()
    load(folder, weights_only=False)
    assert proof.exists(), "the user asked for it"


def test_what_comes_from_the_network_is_not_trusted_more(monkeypatch: pytest.MonkeyPatch, proof: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **options: asked.append(options))
    for weights_only in (None, True, False):
        read_file("https://example.org/model.ckpt", weights_only)
    assert [options["weights_only"] for options in asked] == [True, True, False]


# ------------------------------------------------------------------------------------------------- cache and traces


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


needs_users = pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")


@needs_users
def test_a_cache_that_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    for make in (
        lambda: lts.compile(torch.sin, executors=["inductor"]),
        lambda: lts.ThunderStrategy(executors=["inductor"]),
        lambda: lts.fabric.ThunderFSDPStrategy(executors="auto"),
    ):
        with pytest.raises(PermissionError, match=r"can be written by other users.*chmod go-w.*TORCHINDUCTOR"):
            make()
    lts.ThunderStrategy(executors=["eager"])  # has no such cache
    folder.chmod(0o755)
    lts.ThunderStrategy(executors=["inductor"])


@needs_users
def test_a_cache_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user.*set TORCHINDUCTOR_CACHE_DIR to a folder"):
        lts.ThunderStrategy(executors=["inductor"])


@needs_users
def test_torchs_default_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)  # as with umask 002
    lts.ThunderStrategy(executors=["inductor"])
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o755
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


@needs_users
def test_records_that_others_can_write_are_ignored_with_a_notice(folder: Path) -> None:
    cache.store("key", Program())
    assert cache.load("key") is not None
    entry = folder / "lightning_thunder_strategy" / "key.json"
    assert entry.stat().st_mode & 0o077 == 0
    entry.chmod(0o666)
    with pytest.warns(lts.CompileWarning, match=r"key.json cannot be read and is ignored: .*written by other users"):
        assert cache.load("key") is None
    (folder / "lightning_thunder_strategy").chmod(0o777)
    with pytest.warns(lts.CompileWarning, match=r"could not be stored.*written by other users"):
        cache.store("other", Program())


def test_a_trace_from_disk_runs_only_when_it_is_asked_to(folder: Path, proof: Path) -> None:
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"])
    compiled(torch.ones(2))
    cache.store("key", compiled.record.programs[0])
    entry = folder / "lightning_thunder_strategy" / "key.json"
    stored = json.loads(entry.read_text())
    for trace in stored["traces"]:
        trace["source"] = f"import pathlib\npathlib.Path({str(proof)!r}).touch()\n" + trace["source"]
    entry.write_text(json.dumps(stored))
    program = Program()
    program.restore(cache.load("key"))
    (trace, *_) = program.traces
    assert (str(trace), repr(trace), trace.inputs, trace.outputs) and not proof.exists()
    trace.run(torch.ones(2))
    assert proof.exists()
    assert "A saved trace is code" in (Path(__file__).parent.parent / "docs" / "traces.md").read_text()


# ------------------------------------------------------------------------------------------------------------- sources

FORBIDDEN = {"eval", "system", "popen", "Popen", "check_output", "check_call", "execv", "spawnv"}
RUNS_A_SCRIPT = "bisect.py"  # the command that runs the user's script again and again


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_no_source_runs_text_or_unpickles(file: Path) -> None:
    """No shell, no ``eval``, no plain unpickling; ``exec`` only where a trace is asked to run."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert "subprocess" not in names or file.name == RUNS_A_SCRIPT, file
            assert "cloudpickle" not in names, file
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if owner == "subprocess" and file.name == RUNS_A_SCRIPT:
            assert name == "Popen" and "shell" not in {keyword.arg for keyword in node.keywords}, file
            continue
        method = isinstance(node.func, ast.Attribute) and owner not in ("os", "builtins", "subprocess")
        assert name not in FORBIDDEN or (name == "eval" and method), f"{file}:{node.lineno}"  # module.eval() is fine
        assert name != "exec" or file.name == "trace.py", f"{file}:{node.lineno}"
        assert owner != "pickle" or name not in ("load", "loads"), f"{file}:{node.lineno}"
        if name == "load" and owner == "torch":
            assert "weights_only" in {keyword.arg for keyword in node.keywords}, f"{file}:{node.lineno}"


def test_lightning_classes_are_only_made_when_named() -> None:
    """A configuration text never is a command."""
    with pytest.raises(ValueError, match=r"\$\(touch x\)"):
        lts.ThunderDDPStrategy(process_group_backend="$(touch x)")
    with pytest.raises(ValueError, match="touch"):
        L.Trainer(strategy="thunder; touch x", accelerator="cpu")
