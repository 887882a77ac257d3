"""The examples learn the same with `prefetch` and without, say how long each took, and refuse bad input in one line."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.progress import Progress

import sidestream.demo
from helpers import eventually, run_child, workers
from sidestream import examples, prefetch
from sidestream.examples import images, tabular

CPU = torch.device("cpu")
LINE = re.compile(r"(as people write it|with prefetch): losses ([\d. ]+); \d+\.\d{3} s, the median epoch \d+\.\d{3} s")
NO_CUDA = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def same_thread_count() -> Iterator[None]:
    """The examples set torch's thread count, which is the whole process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eighty pictures, dark and bright ones: one uneven batch."""
    for name, base in (("dark", 20), ("bright", 200)):
        (tmp_path / name).mkdir()
        for number in range(40):
            Image.new("L", (16, 16), base + number).save(tmp_path / name / f"{number}.png")
    return tmp_path


def nothing() -> None:
    pass


def printed(text: str) -> list[tuple[str, list[float]]]:
    """The name and the losses of each run."""
    return [(name, [float(loss) for loss in losses.split()]) for name, losses in LINE.findall(text)]


# tabular


def test_the_rows_are_those_of_the_tutorial() -> None:
    rows = tabular.Rows()
    x = np.stack([rows[i][0].numpy() for i in range(len(rows))])
    y = np.array([rows[i][1].item() for i in range(len(rows))])
    assert (x.shape, x.dtype, y.shape) == ((1000, 10), np.float32, (1000,))
    assert (y == (x.sum(axis=1) > 5)).all()
    assert 400 < y.sum() < 600
    assert (len(tabular.make_loader()), tabular.make_loader().batch_size, tabular.EPOCHS) == (32, 32, 5)


def test_tabular_learns_the_same_with_prefetch_and_its_loss_goes_down() -> None:
    plain = tabular.train(tabular.make_loader(), CPU, 5, nothing)
    with prefetch(tabular.make_loader(), CPU) as loader:
        ahead = tabular.train(loader, CPU, 5, nothing)
    assert (ahead, len(plain)) == (plain, 5)
    assert plain == sorted(plain, reverse=True)
    assert plain[4] < 0.8 * plain[0]


def test_tabular_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tabular.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    (plain, first), (ahead, second) = printed(out)
    assert (plain, ahead, len(first), second) == ("as people write it", "with prefetch", 5, first)
    assert re.search(r"^\d+\.\d\d x as fast by the median epoch, torch with \d+ of \d+ cores\n", out, re.MULTILINE)
    assert eventually(lambda: workers() == [])


# images


def test_images_learns_the_same_with_prefetch_and_its_loss_goes_down(folder: Path) -> None:
    pictures = images.Pictures(folder)
    assert (len(pictures), pictures.found.classes) == (64, ["bright", "dark"])
    plain = images.train(images.make_loader(pictures), CPU, 4, nothing)
    with prefetch(images.make_loader(pictures), CPU) as loader:
        ahead = images.train(loader, CPU, 4, nothing)
    assert (ahead, len(plain)) == (plain, 4)
    assert plain[3] < plain[0]


def test_images_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert images.main(["--device", "cpu", "--epochs", "2", "--data", str(folder)]) == 0
    (plain, first), (ahead, second) = printed(capsys.readouterr().out)
    assert (plain, ahead, len(first), second) == ("as people write it", "with prefetch", 2, first)


def test_images_takes_digits_where_no_folder_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them, written by a stand-in: all 1,797 would take a while."""
    written = []

    def write(target: Path) -> None:
        written.append(target)
        (target / "0").mkdir()
        (target / "1").mkdir()
        for number in range(10):
            Image.new("L", (8, 8), 20 * number).save(target / str(number % 2) / f"{number}.png")

    monkeypatch.setattr(images, "write_digits", write)
    assert images.main(["--device", "cpu", "--epochs", "1"]) == 0
    assert ([path.exists() for path in written], images.write_digits) == ([False], write)


# Both


@pytest.mark.parametrize("name", ["tabular", "images"])
def test_they_run_as_programs(name: str, folder: Path) -> None:
    data = ["--data", str(folder)] if name == "images" else []
    command = [sys.executable, "-W", "error", "-m", f"sidestream.examples.{name}", "--epochs", "2", *data]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=NO_CUDA, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (_, plain), (_, ahead) = printed(done.stdout)
    assert (len(plain), ahead) == (2, plain)
    assert done.stdout.endswith("no CUDA here: ran on the CPU\n")


def test_the_bar_ends_full_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Progress] = []
    make = sidestream.demo.make_progress
    monkeypatch.setattr(sidestream.demo, "make_progress", lambda console: made.append(make(console)) or made[-1])
    assert tabular.main(["--device", "cpu", "--epochs", "2"]) == 0
    tasks = [(task.description, task.completed, task.total) for bar in made for task in bar.tasks]
    assert tasks == [("as people write it", 64, 64), ("with prefetch", 64, 64)]


@pytest.mark.parametrize("example", [tabular, images], ids=["tabular", "images"])
@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_one_line(
    example: Any, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--device", device]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines()), device in err) == ("", 1, True)


@pytest.mark.parametrize("epochs", ["0", "-1", "two"])
def test_epochs_are_counted(epochs: str) -> None:
    with pytest.raises(SystemExit) as caught:
        tabular.main(["--epochs", epochs])
    assert caught.value.code == 2


def test_a_folder_without_pictures_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert images.main(["--device", "cpu", "--data", str(tmp_path)]) == 2
    assert "no images" in capsys.readouterr().err


def test_a_broken_picture_is_one_line_with_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.rglob("*.png"):
        path.write_bytes(b"not a picture")
    assert images.main(["--device", "cpu", "--data", str(folder)]) == 2
    err = capsys.readouterr().err
    assert (len(err.splitlines()), "cannot read the image" in err) == (1, True)


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    assert examples.run(interrupted, examples.make_parser("About.", 1), ["--device", "cpu"]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_without_the_extra_they_name_it() -> None:
    done = run_child("""
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "rich" else find(name, *rest)
        import sidestream.examples.tabular
    """)
    assert (done.returncode, done.stderr) == (1, "the examples need rich: pip install 'sidestream[demo]'\n")
