"""The compiled core: rungs, launch, memory. The thread pool has a test of its own (test_threads.py)."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from rungs import RUNGS
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.reference import ops as reference

pytestmark = pytest.mark.usefixtures("restored")
needs_compiled = pytest.mark.skipif(not core.isa_report()[-2].usable, reason=core.isa_report()[-2].reason)


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the cap of the environment; tests then set what the machine supports."""
    monkeypatch.delenv("TILERANK_ISA", raising=False)
    monkeypatch.setattr(core, "_isa", None)
    return monkeypatch


def silu_mul_input() -> Tensor:
    return torch.randn(7, 66, generator=torch.Generator().manual_seed(0))


# Rungs


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_kernel_runs_on_every_rung(rung: str, threads: int) -> None:
    core.force_isa(rung)
    core.start_pool(None, threads, spin=False)
    assert core.isa() == rung
    x = silu_mul_input()
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), rtol=1e-6, atol=1e-6)


def test_report_lists_every_rung_best_first() -> None:
    report = core.isa_report()
    assert [rung.name for rung in report] == ["amx", "avx512_bf16", "avx512", "avx2", "reference"]
    assert all(rung.usable == (rung.reason == "") for rung in report)
    assert report[-1].usable


@needs_compiled
def test_cpu_flags_and_the_build_explain_the_report(any_machine: pytest.MonkeyPatch) -> None:
    from tilerank.kernels import _C  # missing where kernels run in plain torch

    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    built = {rung for rungs in _C.kernels().values() for rung in rungs}
    wants = {
        "avx2": ["avx2", "fma", "f16c"],
        "avx512": ["avx512f", "avx512_vnni"],
        "avx512_bf16": ["avx512_bf16"],
        "amx": ["amx_tile", "amx_bf16"],
    }
    for rung in core.isa_report()[:-1]:
        missing = [flag for flag in wants["avx512_bf16" if rung.emulated else rung.name] if flag not in flags]
        assert rung.usable == (not missing and rung.name in built), rung.reason


def test_environment_caps_the_ladder(any_machine: pytest.MonkeyPatch) -> None:
    any_machine.setenv("TILERANK_ISA", "reference")
    assert core.isa() == "reference"
    assert [rung.usable for rung in core.isa_report()] == [False, False, False, False, True]
    with pytest.raises(KernelError, match="force_isa: expected a usable rung, found avx2: "):
        core.force_isa("avx2")


def test_unknown_rungs(any_machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        KernelError, match="force_isa: expected one of amx, avx512_bf16, avx512, avx2, reference, found 'sse'"
    ):
        core.force_isa("sse")
    any_machine.setenv("TILERANK_ISA", "AMX")
    with pytest.raises(
        KernelError, match="TILERANK_ISA: expected one of amx, avx512_bf16, avx512, avx2, reference, found 'AMX'"
    ):
        core.isa()


@needs_compiled
def test_a_rung_the_machine_lacks_is_refused_with_its_reason(any_machine: pytest.MonkeyPatch) -> None:
    obstacles = [
        ("amx", "the CPU has no amx_tile"),
        ("avx512_bf16", "the CPU has no avx512f"),
        ("avx512", "the CPU has no avx512f"),
        ("avx2", ""),
    ]
    any_machine.setattr("tilerank.kernels._C.obstacles", lambda: obstacles)
    assert core.isa() == "avx2"
    with pytest.raises(KernelError, match="found amx: the CPU has no amx_tile"):
        core.force_isa("amx")
    any_machine.setenv("TILERANK_ISA", "avx512")
    with pytest.raises(KernelError, match="a rung this machine can run, found avx512: the CPU has no avx512f"):
        core.isa_report()


def test_without_the_compiled_core_everything_runs_in_torch_and_says_so() -> None:
    program = """
import sys
sys.modules["tilerank.kernels._C"] = None
import torch
from tilerank.kernels import core, linear, ops
from tilerank.kernels.reference import ops as reference
from tilerank.kernels.weight_formats import floats
x = torch.randn(3, 8)
assert torch.equal(ops.silu_mul(x), reference.silu_mul(x))
assert core.isa() == "reference" and "cannot be imported" in core.isa_report()[0].reason
core.start_pool([0], spin=False)
assert core.num_threads() == 1 and core.empty((2, 3), torch.bfloat16).shape == (2, 3)
assert not core.alloc(10).any()
core.drop_pages(x)
weight = floats.FloatWeight.empty(4, 8, torch.float32)
weight.write(torch.ones(4, 8))
assert torch.allclose(linear.linear(x, weight), x.sum(1, keepdim=True).expand(3, 4))
"""
    env = {name: value for name, value in os.environ.items() if name != "TILERANK_ISA"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("kernels run in plain torch, slowly: the compiled core cannot be imported") == 1


# Launch


@needs_compiled
def test_what_cannot_be_passed_is_refused() -> None:
    core.force_isa("avx2")
    with pytest.raises(KernelError, match="name of a registered kernel"):
        core.kernel("nothing")
    with pytest.raises(KernelError, match="expected a tensor, found list"):
        ops.silu_mul([1.0])  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="at most 5 dimensions, found 6"):
        ops.silu(torch.zeros(1, 1, 1, 1, 1, 1))
    with pytest.raises(TypeError):
        ops.rms_norm(torch.zeros(1, 1), torch.zeros(1), "1")  # type: ignore[arg-type]


@needs_compiled
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_inside_a_kernel_reaches_the_caller(threads: int) -> None:
    core.force_isa("avx2")
    core.start_pool(None, threads, spin=False)
    for _ in range(20):
        with pytest.raises(KernelError, match="take_rows: rows: expected values in"):
            ops.take_rows(torch.zeros(7, 33), torch.tensor([0, 7]))
    x = silu_mul_input()
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), rtol=1e-6, atol=1e-6)


@needs_compiled
def test_a_forked_process_keeps_working() -> None:
    core.force_isa("avx2")
    core.start_pool(None, 2, spin=False)
    x = silu_mul_input()
    expected = ops.silu_mul(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if core.num_threads() == 2 and torch.equal(ops.silu_mul(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ops.silu_mul(x), expected)


@needs_compiled
def test_pool_arguments() -> None:
    with pytest.raises(KernelError, match="threads: expected at least 1, found 0"):
        core.start_pool(None, 0, spin=False)
    with pytest.raises(KernelError, match="core 100000"):
        core.start_pool([100000], spin=False)
    allowed = os.sched_getaffinity(0)
    core.start_pool([min(allowed)], spin=True)
    assert os.sched_getaffinity(0) == {min(allowed)} and core.num_threads() == 1
    core.start_pool(None, 3, spin=False)
    assert os.sched_getaffinity(0) == allowed and core.num_threads() == 3


# Memory


@needs_compiled
def test_a_block_returns_when_its_last_view_dies() -> None:
    core.isa()
    before = core.arena_bytes()[0]
    x = core.empty((10, 100), torch.float32)
    x.fill_(1)
    address = x.data_ptr()
    view = x[3:, 7:].transpose(0, 1)
    del x
    assert core.arena_bytes()[0] == before + 4032, "10 * 100 * 4 bytes, in units of 64"
    other = core.empty((10, 100), torch.float32)
    assert other.data_ptr() != address
    other.fill_(2)
    assert view.eq(1).all()
    array = view.numpy()
    del view, other
    assert core.arena_bytes()[0] == before + 4032 and (array == 1).all()
    del array
    assert core.arena_bytes()[0] == before


@needs_compiled
def test_a_view_is_that_of_torch_and_keeps_its_block() -> None:
    core.isa()
    before = core.arena_bytes()[0]
    whole = core.empty((6, 40), torch.bfloat16)
    whole.copy_(torch.arange(240).view(6, 40))
    outside = torch.arange(240, dtype=torch.bfloat16).view(6, 40)
    for x in (whole, outside, whole[2:], outside[2:]):
        rows, first = x.shape[0], x.storage_offset()
        view = core.view(x, (rows, 3, 8), (40, 8, 1), 16)
        assert torch.equal(view, x[:, 16:].view(rows, 3, 8)) and view.data_ptr() == x.data_ptr() + 32
        assert x.storage_offset() == first
    del x, view
    view = core.view(whole, (6, 8), (40, 1), 32)
    expected = whole[:, 32:].clone()
    del whole
    assert core.arena_bytes()[0] == before + 512, "6 * 40 * 2 bytes, in units of 64"
    core.empty((6, 40), torch.bfloat16).fill_(7)
    assert torch.equal(view, expected)
    again = core.view(view, (6, 4), (40, 1), 4)
    del view
    assert torch.equal(again, expected[:, 4:])
    del again
    assert core.arena_bytes()[0] == before


@needs_compiled
def test_living_tensors_never_overlap_and_memory_is_reused() -> None:
    rng = random.Random(0)
    living: dict[int, Tensor] = {}
    before = core.arena_bytes()[0]
    mapped = 0
    for step in range(3000):
        if len(living) > 40 or (living and rng.random() < 0.4):
            stamp = rng.choice([*living])
            assert living.pop(stamp).eq(stamp).all()
        tensor = core.empty((rng.choice([1, 3, 64, 1000, 30000]), rng.choice([1, 5])), torch.int32)
        assert tensor.data_ptr() % 64 == 0
        living[step] = tensor.fill_(step)
        mapped = core.arena_bytes()[1] if step == 1000 else mapped
    assert core.arena_bytes()[1] == mapped, "the arena grew although as much was freed as allocated"
    del tensor
    living.clear()
    assert core.arena_bytes()[0] == before


@needs_compiled
def test_tensors_die_on_any_thread() -> None:
    before = core.arena_bytes()[0]
    tensors = [core.empty((n,), torch.uint8) for n in range(1, 400)]
    wrong: list[int] = []

    def churn(own: list[Tensor]) -> None:
        while own:
            own.pop()
            fresh = core.empty((len(own) * 50,), torch.int64).fill_(len(own))
            if not fresh.eq(len(own)).all():
                wrong.append(len(own))

    threads = [threading.Thread(target=churn, args=(tensors[i::4],)) for i in range(4)]
    tensors.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    del threads
    assert core.arena_bytes()[0] == before


@needs_compiled
def test_empty_shapes() -> None:
    core.isa()
    for shape in ((), (0,), (3, 0, 2), (2, 3, 4, 5, 6)):
        tensor = core.empty(shape, torch.bfloat16)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype is torch.bfloat16
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn):
        assert core.empty((2,), dtype).dtype is dtype
    big = core.empty((50 << 20,), torch.uint8)
    big[-1] = 7
    with pytest.raises(KernelError, match="at most 5 dimensions"):
        core.empty((1,) * 6, torch.float32)
    with pytest.raises(KernelError, match="negative size, found -1"):
        core.empty((-1,), torch.float32)
    with pytest.raises(KernelError, match="fits in memory"):
        core.empty((1 << 40, 1 << 40), torch.float32)


@needs_compiled
def test_rows_lie_an_odd_number_of_cache_lines_apart() -> None:
    core.isa()
    for shape, dtype, lines in (
        ((17, 1024), torch.bfloat16, 33),
        ((40, 16, 128), torch.bfloat16, 65),
        ((40, 1024), torch.float32, 65),
        ((20, 96), torch.bfloat16, 3),
        ((20, 5, 32, 2), torch.float32, 21),
    ):
        before = core.arena_bytes()[0]
        rows = core.empty_rows(shape, dtype)
        assert rows.shape == shape and rows.dtype is dtype and rows[0].is_contiguous()
        assert rows.stride(0) * dtype.itemsize == 64 * lines
        assert core.arena_bytes()[0] - before == shape[0] * 64 * lines, "every row has room"
        del rows
    for plain in ((16, 1024), (17, 1000), (17, 0, 4), (17,)):  # few, not whole lines apart, empty, no rows
        assert core.empty_rows(plain, torch.bfloat16).is_contiguous()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


@needs_compiled
@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, (2 << 20) + 1, 64 << 20])
def test_alloc_is_zeroed_aligned_and_unmapped_with_its_last_view(nbytes: int) -> None:
    tensor = core.alloc(nbytes)
    address = tensor.data_ptr()
    assert address % 64 == 0 and tensor.shape == (nbytes,) and tensor.dtype is torch.uint8
    assert not tensor.any()
    tensor.fill_(255)
    view = tensor[-1:]
    del tensor
    assert view.item() == 255 and is_mapped(address)
    del view
    assert not is_mapped(address)


@needs_compiled
def test_alloc_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes()
    tensor = core.alloc(256 << 20)
    assert resident_bytes() - before < 8 << 20
    tensor.fill_(1)
    assert resident_bytes() - before > 250 << 20


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_alloc_takes_memory_at_once_if_asked(threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    before = resident_bytes()
    tensor = core.alloc((256 << 20) + 5000, resident=True)
    assert resident_bytes() - before > 250 << 20
    assert not tensor.any()


@needs_compiled
def test_drop_pages_gives_back_a_file_mapping_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (1 << 18))
    tensor = torch.from_file(str(file), shared=False, size=64 << 20, dtype=torch.uint8)
    total = int(tensor.sum(dtype=torch.int64))
    before = resident_bytes()
    core.drop_pages(tensor[100:])
    assert before - resident_bytes() > 60 << 20
    assert int(tensor.sum(dtype=torch.int64)) == total

    core.drop_pages(tensor.view(-1, 256)[::2, 3:7])
    core.drop_pages(tensor[:0])
    anonymous = torch.full((1 << 20,), 3, dtype=torch.uint8)
    with pytest.raises(KernelError, match="inside a file mapping"):
        core.drop_pages(anonymous)
    assert anonymous.eq(3).all()
