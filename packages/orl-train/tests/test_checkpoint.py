"""A checkpoint is there whole or not at all."""

import errno
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from orl_core.errors import OrlError
from orl_train import checkpoint
from orl_train.errors import CheckpointError


def writes(text):
    return lambda folder: (folder / "file").write_text(text)


def full_disk(folder):
    (folder / "begun").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_is_written_and_replaced(tmp_path):
    target = tmp_path / "made" / "model"
    checkpoint.write_folder(target, writes("old"))
    checkpoint.write_folder(target, writes("new"))
    assert (target / "file").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 576 vs 534"),  # torch.save
    ],
)
def test_a_failed_write_is_a_typed_error_and_leaves_the_old_folder(tmp_path, error):
    target = tmp_path / "model"
    checkpoint.write_folder(target, writes("old"))

    def fail(folder):
        (folder / "begun").write_text("half")
        raise error

    with pytest.raises(CheckpointError, match=r"cannot write .*model: .*Nothing was changed; make room"):
        checkpoint.write_folder(target, fail)
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    checkpoint.write_folder(target, writes("old"))
    rename = Path.rename

    def fail_once(self, other):
        if self.name == "model.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.write_folder(target, writes("new"))
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_old_folder_of_a_run_killed_between_renames_comes_back(tmp_path):
    target = tmp_path / "model"
    checkpoint.write_folder(target, writes("old"))
    target.rename(tmp_path / "model.old.tmp")
    with pytest.raises(CheckpointError):
        checkpoint.write_folder(target, full_disk)
    assert (target / "file").read_text() == "old"


@pytest.mark.parametrize("error", [OrlError("ours"), ValueError("a bug"), KeyboardInterrupt()])
def test_other_errors_pass_and_leave_nothing(tmp_path, error):
    def fail(folder):
        (folder / "begun").write_text("half")
        raise error

    with pytest.raises(type(error)):
        checkpoint.write_folder(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


def complete(folder, step):
    checkpoint.write_folder(
        checkpoint.checkpoint_path(folder, step), lambda f: checkpoint.write_json(f / "run.json", {"step": step})
    )


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10, 100):
        complete(tmp_path, step)
    (tmp_path / "step-00000200").mkdir()  # no run.json
    shutil.copytree(checkpoint.checkpoint_path(tmp_path, 100), tmp_path / "step-00000300.tmp")
    assert checkpoint.latest(tmp_path) == checkpoint.checkpoint_path(tmp_path, 100)


def test_pruning_keeps_the_newest(tmp_path):
    for step in (2, 4, 6, 8):
        complete(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_json_that_cannot_be_read_is_a_typed_error(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "missing.json"):
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
            checkpoint.read_json(tmp_path / name)
