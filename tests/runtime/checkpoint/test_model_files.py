from __future__ import annotations

import huggingface_hub
import pytest

from baton.runtime.checkpoint.model_files import ModelLoadError, resolve_model_folder


def test_a_folder_is_itself(tmp_path):
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c"])
def test_a_path_that_is_no_folder_asks_no_network(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_model_folder(path)


def test_a_file_and_nothing_are_refused(tmp_path):
    (tmp_path / "weights").write_text("")
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model_folder(str(tmp_path / "weights"))
    with pytest.raises(ModelLoadError, match="--model-path"):
        resolve_model_folder("")


def test_a_hub_id_is_downloaded_without_foreign_weight_formats(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, allow_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_folder("someone/model") == tmp_path
    assert asked["repo_id"] == "someone/model"
    assert "*.safetensors" in asked["patterns"] and not any(p.endswith((".bin", ".pth")) for p in asked["patterns"])


def test_a_hub_failure_is_one_clear_error(monkeypatch):
    def offline(*_, **__):
        raise OSError("network is unreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"someone/model is no local folder .*network is unreachable"):
        resolve_model_folder("someone/model")
