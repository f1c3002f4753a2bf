"""scripts/build_horovod.py without compiling: what it builds, when it has nothing to do, and its messages on failure."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.limits import HANGS_S

REPO = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The script as a module, with its own cache."""
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    spec = importlib.util.spec_from_file_location("build_horovod", REPO / "scripts" / "build_horovod.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return module


def test_the_wheel_is_named_after_torch_python_and_platform(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "torch_version", lambda: ("2.13.0+cpu", False))
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    local = script.local_version()
    assert local == f"torch2.13.0.cpu.gloo.{script.PATCHED}"
    folder = script.wheel_folder(local)
    assert folder.name.startswith(f"{local}-{sys.implementation.cache_tag}-")
    assert script.find_wheel(local) is None
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1+x.whl.tmp7").write_text("half")
    assert script.find_wheel(local) is None, "half a wheel is none"
    (folder / "horovod-0.28.1+x.whl").write_text("whole")
    assert script.find_wheel(local).name == "horovod-0.28.1+x.whl"


def toolkit(folder: Path, header: str = "include/cuda_runtime.h") -> Path:
    """A folder that looks like CUDA's."""
    for name in ("bin/nvcc", header):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_mpi_and_nccl_are_built_in_where_they_are(script, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").write_text("")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "nccl"))
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(script, "torch_version", lambda: ("2.13.0", True))
    local = script.local_version()
    assert local == f"torch2.13.0.gloo.mpi.nccl.{script.PATCHED}"
    environment = script.build_environment(local, "-j2", tmp_path)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL" and environment["HOROVOD_WITH_MPI"] == "1"
    assert environment["CUDAToolkit_ROOT"] == str(tmp_path / "cuda")
    assert environment["CUDACXX"] == str(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setattr(script, "torch_version", lambda: ("2.13.0+cpu", False))
    environment = script.build_environment("torch2.13.0.cpu.gloo", "-j2", tmp_path)
    assert environment["HOROVOD_WITHOUT_MPI"] == "1" and not environment["HOROVOD_GPU_OPERATIONS"]


def test_cuda_is_found_where_its_headers_are(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    conda = toolkit(tmp_path / "conda", "targets/x86_64-linux/include/cuda_runtime.h")
    monkeypatch.setattr(script.shutil, "which", lambda name: str(conda / "bin" / name))
    assert script.cuda_home() == conda
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("calls another nvcc")
    monkeypatch.setattr(script.shutil, "which", lambda name: str(tmp_path / "bin" / name))
    assert script.cuda_home() in (None, Path("/usr/local/cuda")), "no headers above this nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert script.cuda_home() is None, "what the user names is not replaced"
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "named")))
    assert script.cuda_home() == tmp_path / "named"


@pytest.mark.parametrize("flags, standard", [("'-std=c++20' '-std=c++17'", "20"), ("'-std=c++17'", "17"), ("", "17")])
def test_the_standard_is_that_of_torch(script, monkeypatch, tmp_path: Path, flags: str, standard: str) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "cpp_extension.py").write_text(f"cflags = [{flags}]\n")
    monkeypatch.setattr(script, "torch_folder", lambda: tmp_path)
    assert script.cxx_standard() == standard
    assert script.build_environment("torch2.13.0.cpu.gloo", "-j2", tmp_path)["HOROVOD_CXX_STANDARD"] == standard


def test_a_missing_compiler_is_one_line(script, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(script.BuildError, match=r"lacks a C\+\+ compiler \(g\+\+\), make.*apt install build-essential"):
        script.check_tools()


def test_every_patch_must_find_its_text(script, tmp_path: Path) -> None:
    for name, old, _ in script.PATCHES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("a") as file:
            file.write(old + "\n")
    script.patch(tmp_path)
    assert "set(CMAKE_CXX_STANDARD $ENV{HOROVOD_CXX_STANDARD})" in (tmp_path / "CMakeLists.txt").read_text()
    with pytest.raises(script.BuildError, match="fits 0.28.1 only"):
        script.patch(tmp_path)


def test_another_source_is_refused(script) -> None:
    script.cache_folder().mkdir(parents=True)
    (script.cache_folder() / script.SDIST).write_text("something else")
    with pytest.raises(script.BuildError, match="checksum differs"):
        script.fetch()
    assert not (script.cache_folder() / script.SDIST).exists()


@pytest.mark.parametrize("output, line", [
    ("... NewConnectionError: ...", "cannot reach the package index"),
    ("fatal error: No space left on device", "the disk is full"),
    ("c++: fatal error: Killed signal terminated program cc1plus", "start again with MAKEFLAGS=-j1"),
    ("x\n/a/b.cc:3:1: error: expected ';'\ny", "failed: /a/b.cc:3:1: error: expected ';'"),
])  # fmt: skip
def test_why_a_build_failed_is_one_line(script, output: str, line: str) -> None:
    said = script.why_it_failed("the build", output)
    assert line in said and "\n" not in said


def test_it_unpacks_with_a_python_that_has_no_filters(script, monkeypatch, tmp_path: Path) -> None:
    """Debian's Python 3.11.2 is one."""
    top = f"horovod-{script.VERSION}"
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"{top}/setup.py"))
    extract = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda archive, path: extract(archive, path))
    assert (script.unpack(tmp_path / "sdist.tar.gz", tmp_path) / "setup.py").exists()


def test_every_installed_package_is_pinned(script) -> None:
    extra = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["horovod"]
    assert script.requirements() == extra
    pins = (REPO / "constraints.txt").read_text()
    assert all(f"\n{name}==" in pins for name in ("wheel", "cmake", "cloudpickle", "psutil", "cffi", "pycparser"))


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built")
def test_a_second_call_is_one_line() -> None:
    environment = {**os.environ, "REPO": str(REPO), "PYTHON": sys.executable}
    command = ["bash", str(REPO / "scripts" / "build_horovod.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0
    said = done.stderr
    assert said.startswith("horovod: 0.28") and said.endswith("is installed\n") and said.count("\n") == 1
