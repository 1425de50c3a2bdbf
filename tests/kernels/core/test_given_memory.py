"""Memory of which `alloc` takes parts, and memory files, which outlive the process that fills them."""

import os
from pathlib import Path

import pytest
import torch
from rungs import COMPILED

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError

pytestmark = pytest.mark.usefixtures("restored")


def test_parts_of_given_memory_follow_each_other() -> None:
    memory = torch.arange(256, dtype=torch.uint8)
    with core.allocating_from(memory):
        parts = [core.alloc(10), core.alloc(0), core.alloc(64, resident=True), core.alloc(65)]
    assert [part.data_ptr() - memory.data_ptr() for part in parts if len(part)] == [0, 64, 128]
    assert [part.tolist() for part in parts] == [[*range(10)], [], [*range(64, 128)], [*range(128, 193)]]
    assert core.alloc(10).tolist() == [0] * 10, "afterwards it is memory of its own again"


def test_given_memory_has_to_fit() -> None:
    memory = torch.zeros(128, dtype=torch.uint8)
    too_much = "expected at most 64 bytes, the rest of the memory, found 65"
    with pytest.raises(KernelError, match=too_much), core.allocating_from(memory):
        core.alloc(64)
        core.alloc(65)
    too_little = "expected all memory to be taken, found 64 bytes left"
    with pytest.raises(KernelError, match=too_little), core.allocating_from(memory):
        core.alloc(1)
    assert not core.alloc(1000).any()


@pytest.mark.skipif(not COMPILED, reason="kernels run in plain torch")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_memory_file(threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    nbytes = 3 * core.HUGE_PAGE
    with open(os.memfd_create("test"), "rb") as file:
        os.ftruncate(file.fileno(), nbytes)
        memory = core.new_file_memory(file.fileno(), nbytes)
        if memory is None:
            pytest.skip("memory files have no huge pages here")
        assert memory.data_ptr() % core.HUGE_PAGE == 0 and memory.shape == (nbytes,) and not memory.any()
        assert huge_kib(memory.data_ptr()) == nbytes // 1024
        memory[5], memory[-1] = 7, 9
        assert os.pread(file.fileno(), 1, 5) + os.pread(file.fileno(), 1, nbytes - 1) == bytes([7, 9])
        del memory
        again = core.old_file_memory(file.fileno(), nbytes)
        assert huge_kib(again.data_ptr()) == nbytes // 1024
        assert (int(again[5]), int(again[-1]), int(again.sum())) == (7, 9, 16)


def huge_kib(address: int) -> int:
    """Return the KiB of huge pages in the mapping of a memory file at an address."""
    mapping = Path("/proc/self/smaps").read_text().split(f"{address:x}-", 1)[1]
    return int(mapping.split("ShmemPmdMapped:", 1)[1].split()[0])
