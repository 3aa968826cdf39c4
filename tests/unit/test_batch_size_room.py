"""The ceiling of memory, what is left below it, and the errors that mean that it was reached."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from ortlab.engine.diagnosis import place, ran_out, says_ran_out
from ortlab.errors import ExecutionError
from ortlab.studies.batch_size import most_of, predicted_peak
from ortlab.studies.batch_size_room import (
    CudaCeiling,
    ProcessCeiling,
    _left,
    available_bytes,
    ceiling_of,
    cuda_fraction,
)

MIB = 1 << 20
ENORMOUS = 1 << 60


def test_an_allocation_beyond_the_ceiling_raises_and_the_next_one_works():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = ProcessCeiling()
    ceiling.put_up(16 * MIB)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(512 * MIB, dtype=torch.uint8)
        small = torch.ones(8 * MIB, dtype=torch.uint8)
    finally:
        ceiling.take_down()
    assert ran_out(caught.value)
    assert "request for 536870912 bytes" in place(caught.value)
    assert int(small.sum()) == 8 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert torch.empty(512 * MIB, dtype=torch.uint8).numel() == 512 * MIB


def test_a_ceiling_is_put_up_twice_and_taken_down_once():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = ProcessCeiling()
    ceiling.take_down()
    ceiling.put_up(64 * MIB)
    ceiling.put_up(-5)  # above the limit already: what is in use stays, and the slack
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] > 0
    ceiling.take_down()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_device_has_the_ceiling_of_its_kind():
    assert isinstance(ceiling_of(torch.device("cpu")), ProcessCeiling)
    assert isinstance(ceiling_of(torch.device("cuda", 0)), CudaCeiling)
    assert cuda_fraction(6 << 30, 24 << 30) == 0.25
    assert cuda_fraction(48 << 30, 24 << 30) == 1.0
    assert 0 < cuda_fraction(-1, 24 << 30) < 1e-9


def allocate(kind: str) -> None:
    """Ask for more than there is."""
    if kind == "torch":
        torch.empty(ENORMOUS, dtype=torch.uint8)
    elif kind == "numpy":
        np.empty(1 << 58)
    elif kind == "Python":
        bytearray(ENORMOUS)
    else:
        try:
            bytearray(ENORMOUS)
        except MemoryError as error:
            raise ExecutionError("It failed while it ran.") from error


@pytest.mark.parametrize("kind", ["torch", "numpy", "Python", "led to another"])
def test_errors_that_mean_that_memory_ran_out(kind):
    with pytest.raises((RuntimeError, MemoryError, ExecutionError)) as caught:
        allocate(kind)
    assert ran_out(caught.value)


def test_errors_that_mean_something_else():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not ran_out(caught.value)
    assert place(caught.value) == ""
    assert not says_ran_out("no such operator")


def test_the_place_is_read_from_what_onnxruntime_says():
    error = RuntimeError(
        "Error in backward pass execution: Non-zero status code returned while running FusedMatMul node. "
        "Name:'/layer.1/MatMul_Grad/FusedMatMul_0' Status Message: ... std::bad_alloc"
    )
    assert ran_out(error)
    assert place(error) == "in backward, at FusedMatMul (/layer.1/MatMul_Grad/FusedMatMul_0)"


def test_what_is_available_is_less_than_the_machine_has():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes() < total


@pytest.mark.parametrize("nested", [True, False])
def test_a_container_leaves_what_its_limit_leaves(tmp_path, nested):
    """Version 2 of control groups; in a container, the path is the host's and the files stand at the root."""
    folder = tmp_path / "outer" / "inner" if nested else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{1000 * MIB}\n")
    (folder / "memory.current").write_text(f"{700 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {100 * MIB}\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert list(_left(tmp_path, "/outer/inner", *names)) == [400 * MIB]
    (folder / "memory.max").write_text("max\n")
    assert list(_left(tmp_path, "/outer/inner", *names)) == []


def test_peaks_are_predicted_on_a_line():
    assert predicted_peak(8, [(1, 110.0), (2, 120.0), (4, 140.0)]) == pytest.approx(180.0)
    assert predicted_peak(8, [(1, 110.0)]) is None
    assert predicted_peak(8, []) is None
    # With plans, the line starts where that without them does.
    assert predicted_peak(8, [(4, 120.0)], [(1, 110.0), (2, 120.0), (4, 140.0)]) == pytest.approx(140.0)
    # A smaller peak for a larger batch is noise, not a slope.
    assert predicted_peak(8, [(1, 110.0), (2, 100.0)]) == pytest.approx(105.0)
    assert most_of(8, 100.0, 2, 130.0) == pytest.approx(220.0)
