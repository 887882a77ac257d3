"""Both runs of the demo learn the same, a fault of the input is one line, Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

from helpers import run_child, workers
from sidestream import demo
from sidestream.cli import main

LINE = re.compile(
    r"(plain|with stages), epoch (\d+) of (\d+): "
    r"(held-out loss \d+\.\d{3}, accuracy \d+\.\d%); [\d,]+ samples/s, \d+% waiting for data"
)
CPU = torch.device("cpu")
NO_CUDA = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def same_thread_count() -> Iterator[None]:
    """The demo sets torch's thread count, which is the whole process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """14 images, dark and bright ones, of several kinds and sizes, and files between them that are none."""
    root = tmp_path / "images"
    for name, base in (("dark", 20), ("bright", 200)):
        (root / name).mkdir(parents=True)
        for number, mode in enumerate(("L", "RGB", "RGBA", "P", "CMYK", "1", "LA")):
            size = (16 + number, 20)
            Image.new("L", size, base + number).convert(mode).save(root / name / f"{number}.{suffix(mode)}")
        (root / name / "notes.txt").write_text("not an image")
    (root / "empty").mkdir()
    (root / "Readme.md").write_text("not a class")
    return root


def suffix(mode: str) -> str:
    """A file kind that keeps `mode`."""
    return "TIFF" if mode == "CMYK" else "png"


def demo_of(folder: Path, *options: str) -> list[str]:
    """The arguments of a demo with the user's images, on the CPU."""
    return ["demo", "--data", str(folder), "--device", "cpu", *options]


@pytest.mark.parametrize("batch_size", ["1", "5", "1000"])  # one each, an uneven last batch, fewer than a batch
def test_both_runs_learn_the_same(folder: Path, batch_size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 119 too: augmentation draws on the worker, yet the epochs of both runs end with equal results."""
    assert main(demo_of(folder, "--epochs", "3", "--batch-size", batch_size)) == 0
    out, err = capsys.readouterr()
    lines = LINE.findall(out)
    assert [line[:3] for line in lines] == [
        ("plain", "1", "2"),
        ("plain", "2", "2"),
        ("with stages", "1", "3"),
        ("with stages", "2", "3"),
        ("with stages", "3", "3"),
    ]
    results = [line[3] for line in lines]
    assert results[:2] == results[2:4]
    assert err == ""


def test_the_output_has_both_rates_and_says_where_it_ran(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo_of(folder, "--epochs", "1")) == 0
    out = capsys.readouterr().out
    cores = len(os.sched_getaffinity(0))
    assert out.startswith(
        f"2 classes, 12 images, 2 more held out\nComputing on cpu, torch with {max(1, cores - 1)} of {cores} cores\n"
    )
    assert re.search(r"plain +\S +[\d,]+ +\S +\d+% of each step", out)
    assert re.search(r"with stages +\S +[\d,]+ +\S +\d+% of each step", out)
    assert re.search(r"\n\d+\.\d\d x the samples per second with the stages\n", out)
    assert out.endswith("ran on the CPU\n")


def test_the_default_device_is_cuda_where_there_is_one(folder: Path) -> None:
    code = f"""
        import sys, torch
        from sidestream.cli import main
        code = main(["demo", "--epochs", "1", "--data", {str(folder)!r}])
        print("expected", "ran on cuda" if torch.cuda.is_available() else "no CUDA here: ran on the CPU")
        sys.exit(code)
    """
    child = run_child(code)
    said, expected = child.stdout.splitlines()[-2:]
    assert (child.returncode, child.stderr) == (0, "")
    assert said.startswith(expected.removeprefix("expected "))


def test_without_cuda_the_default_is_the_cpu_and_nothing_warns(folder: Path) -> None:
    child = run_child(child_code("--epochs", "1", "--data", str(folder)), env=NO_CUDA)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.endswith("no CUDA here: ran on the CPU\n")


def child_code(*options: str) -> str:
    """A program that runs the demo in a process of its own."""
    return f"import sys; from sidestream.cli import main; sys.exit(main({['demo', *options]!r}))"


# Input that cannot be used: one line, exit code 2.


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What one line on stderr said."""
    err = capsys.readouterr().err
    assert err.startswith("sidestream: ")
    assert err.count("\n") == 1
    return err.removeprefix("sidestream: ").rstrip("\n")


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo_of(tmp_path / "none")) == 2
    assert said(capsys) == f"--data {tmp_path}/none: No such file or directory"


def test_a_file_in_place_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(demo_of(tmp_path / "file")) == 2
    assert said(capsys) == f"--data {tmp_path}/file: Not a directory"


def test_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").touch()
    Image.new("L", (16, 16)).save(tmp_path / "not_in_a_class.png")
    assert main(demo_of(tmp_path)) == 2
    assert said(capsys) == f"--data {tmp_path}: no images in its sub-folders (one sub-folder for each class)"


def test_one_class_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cats").mkdir()
    Image.new("L", (16, 16)).save(tmp_path / "cats" / "0.png")
    assert main(demo_of(tmp_path)) == 2
    assert said(capsys) == f"--data {tmp_path}: one class only (cats), at least two are needed"


@pytest.mark.parametrize("kept", [0, 10, 60])  # an empty file, a header alone, an image that is cut off
def test_a_broken_image_is_named(folder: Path, kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    broken = break_image(folder, kept)
    assert main(demo_of(folder, "--epochs", "1")) == 2
    assert said(capsys).startswith(f"cannot read the image {broken}: ")


def test_an_image_that_breaks_on_the_worker_is_named_alike(folder: Path) -> None:
    data = demo.read_folder(folder)
    break_image(folder, 60)
    messages = []
    for stages in (False, True):
        with pytest.raises(demo.DemoError) as caught:
            demo.train(demo.Setup(data, 4, CPU, stages), 1, Console(quiet=True))
        messages.append(str(caught.value))
    assert messages[0].startswith(f"cannot read the image {folder}/dark/1.png: ")
    assert messages[1] == messages[0]


def break_image(folder: Path, kept: int) -> Path:
    """Cut one of the images off after `kept` bytes."""
    path = folder / "dark" / "1.png"
    path.write_bytes(path.read_bytes()[:kept])
    return path


@pytest.mark.parametrize("option", ["--epochs", "--batch-size"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\N{SUPERSCRIPT TWO}", ""])
def test_numbers_that_make_no_sense(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", option, value])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"sidestream demo: error: argument {option}: {value!r} is not a whole number of at least 1"


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("sidestream: error: the following arguments are required: COMMAND\n")


@pytest.mark.parametrize("device", ["mps", "meta", "cuda:x", "abacus", ""])
def test_a_device_that_the_stage_does_not_take(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"not {device!r}") as refused:
        demo.IterableWrapper([]).to_cuda_stream(device)
    assert main(["demo", "--device", device]) == 2
    assert said(capsys) == f"--device {device}: {refused.value}"


def test_a_cuda_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda:99"]) == 2
    assert said(capsys) == f"--device cuda:99: CUDA devices here: {torch.cuda.device_count()}"


def test_cuda_without_cuda() -> None:
    child = run_child(child_code("--device", "cuda"), env=NO_CUDA)
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr == "sidestream: --device cuda: CUDA devices here: 0\n"


@pytest.mark.parametrize("package", ["rich", "numpy", "PIL", "sklearn"])
def test_a_missing_extra(package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    assert said(capsys) == f"the demo needs {package}: pip install 'sidestream[demo]'"


# Ctrl-C


@pytest.mark.parametrize(("epochs", "bar"), [(12, r"plain .* [1-9]\d*/4314"), (2, r"with stages .* [1-9]\d*/2876")])
def test_ctrl_c_ends_it_cleanly(tmp_path: Path, epochs: int, bar: str) -> None:
    """In both runs, in mid-epoch: a message, exit code 130, no traceback, no digits and no thread left."""
    code = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
        from helpers import settled
        from sidestream.cli import main
        code = main(["demo", "--device", "cpu", "--epochs", "{epochs}"])
        print("no thread left:", settled(0))
        sys.exit(code)
    """
    with start_child(code, TMPDIR=str(tmp_path), FORCE_COLOR="1") as child:
        try:
            assert any(re.search(bar, line) for line in child.stdout)  # a carriage return ends a line, too
            assert len(list(tmp_path.glob("sidestream-demo-*/?/*.png"))) == 1797
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130
    assert err == "sidestream: stopped by Ctrl-C\n"
    assert out.endswith("no thread left: True\n")
    assert list(tmp_path.glob("sidestream-demo-*")) == []


def start_child(code: str, **environment: str) -> subprocess.Popen[str]:
    """A process for `code` that writes each line at once; FORCE_COLOR gives it the progress bar."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
    )


# The parts


def test_the_digits_are_written_as_files(tmp_path: Path) -> None:
    demo.write_digits(tmp_path)
    files = sorted(tmp_path.glob("*/*"))
    assert len(files) == 1797
    assert Counter(int(path.parent.name) for path in files) == Counter(load_digits().target.tolist())
    for path in files:
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "L", (224, 224))


def test_the_held_out_part_is_the_same_each_time_and_never_trained_on(folder: Path) -> None:
    first, second = demo.read_folder(folder), demo.read_folder(folder)
    assert first == second
    assert first.classes == ["bright", "dark"]
    assert (len(first.train), len(first.held_out)) == (12, 2)
    everything = {(path, int(path.parent.name == "dark")) for path in folder.glob("*/[0-9].*")}
    assert set(first.train) | set(first.held_out) == everything


def test_the_stages_change_no_batch_and_each_epoch_has_an_order_of_its_own(folder: Path) -> None:
    """The pipe without the stages is the truth, over two epochs, for shuffled and for augmented images."""
    plain, staged = (two_epochs(demo.Setup(demo.read_folder(folder), 5, CPU, stages)) for stages in (False, True))
    assert [len(labels) for _, labels in plain] == [5, 5, 2] * 2
    for (images, labels), (true_images, true_labels) in zip(staged, plain, strict=True):
        assert torch.equal(images, true_images)
        assert torch.equal(labels, true_labels)
    assert not torch.equal(torch.cat([labels for _, labels in plain[:3]]), torch.cat([y for _, y in plain[3:]]))


def test_a_loop_that_ends_early_ends_the_stages(folder: Path) -> None:
    data = demo.read_folder(folder)
    loader = demo.make_loader(demo.Setup(data, 1, CPU, stages=True), data.train, training=True)
    batches = demo.timed(loader, demo.Time())
    next(batches)
    assert workers() != []  # 12 batches are more than the stages may load ahead
    batches.close()
    assert workers() == []


def two_epochs(setup: demo.Setup) -> list[list[torch.Tensor]]:
    """The training batches."""
    loader = demo.make_loader(setup, setup.data.train, training=True)
    return [batch for _ in range(2) for batch in demo.timed(loader, demo.Time())]


@pytest.mark.parametrize(
    ("mode", "colour", "gray"),
    [
        ("L", 77, 77),
        ("RGB", (77, 77, 77), 77),
        ("RGBA", (77, 77, 77, 255), 77),
        ("LA", (77, 255), 77),
        ("1", 1, 255),
        ("I;16", 40000, 255),  # scaled by its brightest pixel
    ],
)
def test_every_kind_of_image_is_a_gray_tensor(
    tmp_path: Path, mode: str, colour: int | tuple[int, ...], gray: int
) -> None:
    Image.new(mode, (30, 50), colour).save(tmp_path / "0.png")
    pixels, label = demo.decode((tmp_path / "0.png", 3))
    assert torch.equal(pixels, torch.full((1, demo.SIZE, demo.SIZE), gray, dtype=torch.uint8))
    assert label == 3


def test_a_palette_with_transparent_colours_makes_no_noise(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 77, 77, 77])
    image.save(tmp_path / "0.png", transparency=b"\x00\xff")
    assert np.unique(demo.decode((tmp_path / "0.png", 0))[0]).tolist() == [77]


def test_augmentation_leaves_the_global_generator_alone() -> None:
    """Case 119."""
    image = torch.zeros(1, demo.SIZE, demo.SIZE, dtype=torch.uint8)
    image[0, 30, 30] = 255
    before = torch.get_rng_state()
    one, other = demo.Shift(), demo.Shift()
    shifted = [one((image, 7)) for _ in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(other((image, 7))[0], moved) for moved, _ in shifted)
    places = {tuple(moved[0].nonzero()[0].tolist()) for moved, label in shifted if label == 7}
    assert len(places) > 1
    assert all(abs(row - 30) <= demo.SHIFT and abs(column - 30) <= demo.SHIFT for row, column in places)
