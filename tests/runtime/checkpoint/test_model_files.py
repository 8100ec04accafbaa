from __future__ import annotations

import re

import huggingface_hub
import pytest

from baton.runtime.checkpoint.model_files import ModelLoadError, resolve_model_folder


def test_local_folder_resolves_to_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c"])
def test_missing_local_path_does_not_query_hub(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_model_folder(path)


def test_file_and_empty_model_paths_are_refused(tmp_path):
    (tmp_path / "weights").write_text("")
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model_folder(str(tmp_path / "weights"))
    with pytest.raises(ModelLoadError, match="--model-path"):
        resolve_model_folder("")


def test_an_empty_folder_is_recognised(tmp_path):
    with pytest.raises(ModelLoadError, match=r"--model-path \S+ is an empty folder\. .*was the download finished\?"):
        resolve_model_folder(str(tmp_path))


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "MODEL.GGUF"])
def test_a_gguf_file_that_is_none_is_recognised(tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=rf"{name} is cut off or damaged"):
        resolve_model_folder(str(tmp_path / name))
    for beside in (None, "config.json", "README.md"):  # as hubs have them
        if beside is not None:
            (tmp_path / beside).write_text("{}")
        with pytest.raises(ModelLoadError, match=rf"{name} is cut off or damaged"):
            resolve_model_folder(str(tmp_path))
    (tmp_path / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"holds several GGUF files \(.*second\.gguf\); give the path of the one"):
        resolve_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.pth"]
)
def test_a_folder_of_pickles_is_recognised(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    command = f"python -m baton.entrypoints.convert_weights {tmp_path} --output {tmp_path}-safetensors"
    with pytest.raises(ModelLoadError, match=rf"weights as pickles \({name}\).*`{re.escape(command)}`"):
        resolve_model_folder(str(tmp_path))


def test_tokenizer_folder_with_foreign_weights_is_accepted(tmp_path):
    """With --load-format dummy, or as --tokenizer-path."""
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").unlink()
    assert resolve_model_folder(str(tmp_path)) == tmp_path, "a folder of safetensors is no foreign one"


def test_hub_download_leaves_out_foreign_weight_formats(tmp_path, monkeypatch):
    asked = {}
    (tmp_path / "config.json").write_text("{}")

    def snapshot_download(repo_id, allow_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_folder("someone/model") == tmp_path
    assert asked["repo_id"] == "someone/model"
    assert "*.safetensors" in asked["patterns"] and not any(p.endswith((".bin", ".pth")) for p in asked["patterns"])


def test_gguf_file_of_the_hub_is_downloaded_alone(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def download(repo_id, filename):
        asked.append((repo_id, filename))
        return str(tmp_path / "m.gguf")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ModelLoadError, match=r"m\.gguf is cut off or damaged"):
        resolve_model_folder("someone/model-GGUF/q4/m.gguf")
    assert asked == [("someone/model-GGUF", "q4/m.gguf")]
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_model_folder("/no/such/m.gguf")


def test_hub_failure_is_a_model_load_error(monkeypatch):
    def offline(*_, **__):
        raise OSError("network is unreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"someone/model is no local folder .*network is unreachable"):
        resolve_model_folder("someone/model")
