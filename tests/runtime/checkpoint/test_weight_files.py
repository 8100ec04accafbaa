"""Which files of a folder are read, and what is said of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.checkpoint.weight_files import StoredTensor, read_header, stored_tensors


def save(folder: Path, name: str, *tensors: str) -> Path:
    save_file({tensor: torch.zeros(2, 3, dtype=torch.bfloat16) for tensor in tensors}, folder / name)
    return folder / name


def save_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def found_in(folder: Path) -> dict[str, str]:
    return {name: tensor.file.name for name, tensor in stored_tensors(folder).items()}


def test_header_is_read_without_torch(tmp_path: Path) -> None:
    file = save(tmp_path, "model.safetensors", "a")
    assert stored_tensors(tmp_path) == {"a": StoredTensor(file, "a", "BF16", (2, 3))}
    code = "import sys, baton.runtime.checkpoint.weight_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]
)
def test_sizes_of_all_dtypes_are_known(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.zeros(3, 5).to(dtype), "scalar": torch.zeros(()).to(dtype)}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert (header["a"].shape, header["scalar"].shape) == ((3, 5), ())


def test_index_decides_beside_consolidated_files(tmp_path: Path) -> None:
    save(tmp_path, "consolidated.safetensors", "layers.0.attention.wq.weight")
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    save(tmp_path, "model-00002-of-00002.safetensors", "b")
    save_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    expected = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert found_in(tmp_path) == expected
    (tmp_path / "model.safetensors.index.json").unlink()
    assert found_in(tmp_path) == expected


def test_index_decides_between_two_copies(tmp_path: Path) -> None:
    save(tmp_path, "old.safetensors", "a", "b")
    save(tmp_path, "new.safetensors", "a")
    save_index(tmp_path, {"a": "new.safetensors", "b": "old.safetensors"})
    assert found_in(tmp_path) == {"a": "new.safetensors", "b": "old.safetensors"}


def test_single_file_is_read_alone(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "tuned.safetensors"):
        save(tmp_path, name, "a")
    assert found_in(tmp_path) == {"a": "model.safetensors"}


def test_adapters_and_consolidated_copies_are_left_out(tmp_path: Path) -> None:
    for name in ("weights.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        save(tmp_path, name, "a")
    assert found_in(tmp_path) == {"a": "weights.safetensors"}


def test_only_mistrals_own_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "consolidated.safetensors", "layers.0.attention.wq.weight")
    with pytest.raises(
        ModelLoadError, match=r"Mistral's own format only \(consolidated\*\.safetensors\); give a folder"
    ):
        stored_tensors(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    save(tmp_path, "consolidated.safetensors", "model.layers.0.mlp.up_proj.weight")  # a name is no format
    assert found_in(tmp_path) == {"model.layers.0.mlp.up_proj.weight": "consolidated.safetensors"}


def test_missing_shards_without_an_index_are_named(tmp_path: Path) -> None:
    save(tmp_path, "model-00002-of-00003.safetensors", "a")
    with pytest.raises(ModelLoadError, match=r"lacks model-00001-of-00003\S+, model-00003-of-00003\S+ of 3 shards"):
        stored_tensors(tmp_path)


def test_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "x.safetensors", "a")
    save(tmp_path, "y.safetensors", "a")
    with pytest.raises(ModelLoadError, match=r"y\.safetensors and x\.safetensors in .* both hold tensor a"):
        stored_tensors(tmp_path)


def test_index_of_another_download_is_recognised(tmp_path: Path) -> None:
    save(tmp_path, "x.safetensors", "a")
    save_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(ModelLoadError, match=r"names tensors that their files do not hold: b \(x\.safetensors\)"):
        stored_tensors(tmp_path)
    save_index(tmp_path, {"a": "../x.safetensors"})
    with pytest.raises(ModelLoadError, match="is no safetensors index"):
        stored_tensors(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    file = save(tmp_path, "model.safetensors", "a")
    whole = file.read_bytes()
    for content, message in [
        (whole[:-1], r"describes 12 bytes of tensors, the file has 11; was the download cut short\?"),
        (whole + b"x", r"describes 12 bytes of tensors, the file has 13; download it again"),
        (whole[:20], "20 bytes are too few for its header"),
        (b"", "0 bytes are too few for its header"),
        (b"\2\0\0\0\0\0\0\0{]", "it is no safetensors file"),
        (b"\2\0\0\0\0\0\0\0[]", "it is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git LFS pointer.*git lfs pull"),
        (whole.replace(b"[2,3]", b"[2,4]"), r"tensor a is BF16 \[2, 4\], but takes 12 bytes"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=rf"model\.safetensors.*{message}"):
            stored_tensors(tmp_path)
