"""Weights in several files: divided as asked, read by Hugging Face and by this project, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from gpt2_chinese.checkpoint.sealed_folder import damage
from gpt2_chinese.checkpoint.shards import INDEX, divide, parse_size
from gpt2_chinese.checkpoint.trained_model import begin_from, read_weights
from gpt2_chinese.errors import UserError
from gpt2_chinese.generate.__main__ import main as generate
from gpt2_chinese.weights import export, main
from tests.gpt2_chinese.checkpoint.test_weights import folder, state, theirs, transformers, write  # noqa: F401  (fixtures)


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_every_tensor_is_in_one_file_and_no_file_is_too_large_or_divided_too_early(sizes, most) -> None:
    files = divide(sizes, most)
    assert [name for part in files for name in part] == list(sizes)
    bytes_of = [sum(sizes[name] for name in part) for part in files]
    assert all(size <= most or len([name for name in part if sizes[name]]) == 1
               for size, part in zip(bytes_of, files, strict=True))  # fmt: skip
    for (part, following), size in zip(zip(files, files[1:], strict=False), bytes_of, strict=False):
        assert part and size + sizes[following[0]] > most


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("70000", 70_000),
                                        ("1TB", 10**12), ("3 B", 3)])  # fmt: skip
def test_sizes_have_the_units_of_hugging_face(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "0.1B", "5 XB", "5GBs", "1e3", "５GB", "inf", "nan"])
def test_what_is_no_size_is_one_line(text: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", "nowhere", "--output", "none", f"--max-shard-size={text}"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: --max-shard-size {text!r} is no size: give a number with a unit, such as 5GB or 512MiB")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_in_files_is_read_by_both_and_divided_as_hugging_face_divides(theirs, folder, tmp_path, dtype) -> None:  # noqa: F811
    write(state(theirs), folder, "safetensors")
    most = 40_000
    out = export(folder, tmp_path / "out", dtype=dtype, max_shard_size=f"{most // 1000}KB")
    index = json.loads((out / INDEX).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3 and files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    held = {file: load_file(out / file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    total = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total == sum(p.numel() for p in theirs.parameters()) * (2 if dtype else 4)
    assert all(sum(t.nbytes for t in tensors.values()) <= most or len(tensors) == 1 for tensors in held.values())

    wanted = {name: tensor.to(torch.bfloat16 if dtype else torch.float32) for name, tensor in theirs.named_parameters()}
    again, told = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.named_parameters())
    ours = read_weights(out)
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert begin_from(out) == (out / INDEX, out / "vocab.txt") and damage(out) is None
    assert (out / files[0]).stat().st_mode & 0o077 == out.stat().st_mode & 0o066, "others may read it as they may the folder"
    if dtype is None:
        theirs.save_pretrained(tmp_path / "theirs", max_shard_size=f"{most // 1000}KB")
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == len(files)


def test_a_model_in_files_generates_the_text_of_the_model_in_one(theirs, folder, tmp_path, capsys) -> None:  # noqa: F811
    write(state(theirs), folder, "safetensors")
    said = []
    for size in (None, "40kB"):
        out = export(folder, tmp_path / f"out{size}", max_shard_size=size)
        generate(["--model", str(out), "--prompt", "今天", "--length", "12", "--seed", "1"])
        said.append(capsys.readouterr().out.replace(str(out), ""))
    assert said[0] == said[1] and "今天" in said[0]
    one = export(tmp_path / "out40kB", tmp_path / "one", max_shard_size="1GB")
    assert (one / "model.safetensors").is_file() and not (one / INDEX).exists(), "what fits into one file is one"


def test_a_missing_or_changed_file_is_one_line(theirs, folder, tmp_path) -> None:  # noqa: F811
    write(state(theirs), folder, "safetensors")
    out = export(folder, tmp_path / "out", max_shard_size="40kB")
    second = sorted(out.glob("model-*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"cannot be used: {second.name}"):
        begin_from(out)
    second.unlink()
    with pytest.raises(UserError, match=f"{INDEX} names {second.name}, which is missing: the download is not complete"):
        read_weights(out)


def test_an_export_that_fails_midway_leaves_nothing_at_its_path(theirs, folder, tmp_path, monkeypatch) -> None:  # noqa: F811
    import safetensors.torch

    write(state(theirs), folder, "safetensors")
    save, saved = safetensors.torch.save_file, []

    def full(tensors: dict, path: Path, **more) -> None:
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save(tensors, path, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match=r"--output \S+out cannot be written: No space left on device"):
        export(folder, tmp_path / "out", max_shard_size="40kB")
    assert len(saved) == 2 and not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert damage(export(folder, tmp_path / "out", max_shard_size="40kB")) is None, "the next export begins anew"


def test_shards_are_for_safetensors(folder, tmp_path) -> None:  # noqa: F811
    with pytest.raises(UserError, match="--max-shard-size is for --format safetensors"):
        export(folder, tmp_path / "out", form="bin", max_shard_size="1GB")


def test_numbers_that_are_not_finite_are_refused_in_any_file(theirs, folder, tmp_path) -> None:  # noqa: F811
    found = state(theirs)
    found["transformer.ln_f.bias"][3] = float("inf")
    write(found, folder, "safetensors")
    with pytest.raises(UserError, match=r"hf is not exported: transformer\.ln_f\.bias holds numbers that are not finite"):
        export(folder, tmp_path / "out", max_shard_size="40kB")
    assert not (tmp_path / "out").exists()
