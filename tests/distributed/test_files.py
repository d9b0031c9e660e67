"""Files and folders take the place of others in one step, or leave them whole."""

from pathlib import Path

import pytest

from lightning_thunder_strategy.distributed import files
from lightning_thunder_strategy.distributed.files import beside, remove, replacing


def make(path: Path, kind: str, text: str) -> None:
    if kind == "folder":
        path.mkdir()
        (path / "inner").write_text(text)
    elif kind == "file":
        path.write_text(text)


def read(path: Path) -> str:
    return (path / "inner" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize("new", ["file", "folder"])
@pytest.mark.parametrize("old", ["file", "folder", "nothing"])
def test_the_new_takes_the_place_of_the_old(old: str, new: str, exchange: bool, tmp_path, monkeypatch) -> None:
    if not exchange:  # as on a file system that cannot exchange two names
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    path = tmp_path / "model.ckpt"
    make(path, old, "old")
    with replacing(path, beside(path)) as temporary:
        make(temporary, new, "new")
    assert read(path) == "new" and path.is_dir() == (new == "folder")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("old", ["file", "folder"])
def test_an_error_leaves_the_old_whole_and_nothing_else(old: str, tmp_path) -> None:
    path = tmp_path / "model.ckpt"
    make(path, old, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path, beside(path)) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert read(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_beside_is_hidden_and_of_its_own_name(tmp_path) -> None:
    first, second = beside(tmp_path / "model.ckpt"), beside(tmp_path / "model.ckpt")
    assert first != second and first.parent == tmp_path
    assert first.name.startswith(".model.ckpt.") and first.name.endswith(".partial")


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path) -> None:
    target, path = tmp_path / "target", tmp_path / "last.ckpt"
    make(target, "folder", "kept")
    path.symlink_to(target)
    with replacing(path, beside(path)) as temporary:
        temporary.write_text("new")
    assert not path.is_symlink() and read(path) == "new" and read(target) == "kept"


def test_removing_what_is_not_there_is_fine(tmp_path) -> None:
    remove(tmp_path / "nothing")
    make(tmp_path / "folder", "folder", "x")
    remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
