"""Loading: every rank reads exactly its rectangles, in storage order, within bounded memory; errors name the tensor."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import load_rank
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.checkpoint import INDEX, SINGLE, Checkpoint
from tilerank.loader.errors import CheckpointError
from tilerank.loader.weights import LoadReport, load_weights, peak_rss
from tilerank.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from tilerank.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import Layer, PackedParameter, PlainParameter
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.attention import SelfAttention
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.models.gated_mlp import GatedMLP
from tilerank.runtime.models.text_config import read_text_config
from tilerank.runtime.rank.registry import build_model

SINGLE_RANK = Sharding(0, 1, torch.float32, None)


def nothing(name: str) -> bool:
    return False


def load(model: Layer, model_dir: Path, ignore: Callable[[str], bool] = nothing) -> LoadReport:
    return load_weights(model, Checkpoint(model_dir), ignore=ignore, progress=False)


def decoder(card: ModelCard, sharding: Sharding) -> Decoder:
    model = build_model(card, sharding)
    assert isinstance(model, Decoder)
    return model


def tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in model_dir.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3", tmp_path_factory.mktemp("checkpoints"), layers=2, heads=7, kv_heads=7, hidden=112)


def expect(part: torch.Tensor, whole: torch.Tensor, *real: tuple[int, int]) -> None:
    """Assert that `part` begins with the rectangle `real` of `whole` and is zero beyond it."""
    taken = whole[tuple(slice(*span) for span in real)].to(part.dtype)
    inside = tuple(slice(0, stop - start) for start, stop in real)
    assert torch.equal(part[inside], taken)
    rest = part.clone()
    rest[inside] = 0
    assert not rest.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("strategy", ["pad", "split"])
def test_every_rank_holds_its_rectangles(llama: Path, dtype: torch.dtype, size: int, strategy: Any) -> None:
    card, whole = read_card(llama), tensors(llama)
    config = read_text_config(card.fields)
    seen = 0
    for rank in range(size):
        model = decoder(card, Sharding(rank, size, dtype, None, strategy))
        load(model, llama)
        assert isinstance(model.embedding, VocabParallelEmbedding) and isinstance(model.head, ParallelLMHead)
        vocabulary = (model.embedding.span.start, model.embedding.span.stop)
        hidden = (0, config.hidden_size)
        assert isinstance(model.embedding.table, PlainParameter)
        expect(model.embedding.table.data, whole["model.embed_tokens.weight"], vocabulary, hidden)
        expect(model.head.weight.packed.unpack(), whole["lm_head.weight"], vocabulary, hidden)
        expect(model.norm.weight.data, whole["model.norm.weight"], hidden)
        name, attention, mlp = "model.layers.1", model.layers[1].mixer, model.layers[1].mlp
        assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
        width = (mlp.gate_up.span.start, mlp.gate_up.span.stop)
        gate, up = (mlp.gate_up.weight.part(part).unpack() for part in (0, 1))
        expect(gate, whole[f"{name}.mlp.gate_proj.weight"], width, hidden)
        expect(up, whole[f"{name}.mlp.up_proj.weight"], width, hidden)
        expect(mlp.down.weight.packed.unpack(), whole[f"{name}.mlp.down_proj.weight"], hidden, width)
        seen += width[1] - width[0]
        rows = (attention.qkv.q_columns.start, attention.qkv.q_columns.stop)
        if rows[0] < rows[1]:
            kv = attention.qkv.heads.kv[rank].scaled(config.head_dim)
            sizes = [attention.qkv.q_heads * config.head_dim, kv.size, kv.size]
            q, k, v = torch.split(attention.qkv.stacks[0].weight.packed.unpack(), sizes)
            expect(q, whole[f"{name}.self_attn.q_proj.weight"], rows, hidden)
            expect(k, whole[f"{name}.self_attn.k_proj.weight"], (kv.start, kv.stop), hidden)
            expect(v, whole[f"{name}.self_attn.v_proj.weight"], (kv.start, kv.stop), hidden)
            expect(attention.out.weight.packed.unpack(), whole[f"{name}.self_attn.o_proj.weight"], hidden, rows)
    assert seen == config.intermediate_size


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_any_float_dtype_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"a.weight": weight, "n.weight": weight[0].clone()}, tmp_path / SINGLE)
    model = Layer()
    sharding = Sharding(0, 1, torch.bfloat16, None)
    model.a = ColumnParallelLinear("a", 24, 40, sharding)  # type: ignore[attr-defined]
    model.n = RMSNorm("n", 24, 1e-5, sharding)  # type: ignore[attr-defined]
    load(model, tmp_path)
    assert torch.equal(model.a.weight.packed.unpack(), weight.bfloat16())  # type: ignore[attr-defined]
    assert torch.equal(model.n.weight.data, weight[0].bfloat16())  # type: ignore[attr-defined]


def test_report(llama: Path) -> None:
    card = read_card(llama)
    config = read_text_config(card.fields)
    whole = tensors(llama)
    one = load(build_model(card, SINGLE_RANK), llama)
    assert one.tensors == len(whole)
    assert one.bytes_read == sum(tensor.nbytes for tensor in whole.values())
    assert one.peak_rss > 100e6  # torch alone
    parts = [load(build_model(card, Sharding(rank, 2, torch.float32, None)), llama) for rank in range(2)]
    norms = (2 * config.num_layers + 1) * config.hidden_size * 2
    assert sum(part.bytes_read for part in parts) == one.bytes_read + norms


def test_peak_memory_grows_with_what_is_touched() -> None:
    before = peak_rss()
    touched = torch.ones(before + (64 << 20), dtype=torch.uint8)
    assert before + touched.numel() // 2 > peak_rss() - before > 32 << 20


def test_slices_are_read_in_storage_order(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Path, int]] = []
    original = Checkpoint.read

    def recorded(self: Checkpoint, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        view = original(self, name, index)
        read.append((self.info(name).file, view.data_ptr()))
        return view

    monkeypatch.setattr(Checkpoint, "read", recorded)
    load(build_model(read_card(llama), Sharding(0, 2, torch.float32, None)), llama)
    assert len(read) > 20
    assert read == sorted(read)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    original = make_checkpoint("llama3", tmp_path, layers=1, tied=True)
    whole = tensors(original)
    assert "lm_head.weight" not in whole
    card = read_card(original)
    config = read_text_config(card.fields)
    model = decoder(card, SINGLE_RANK)
    load(model, original)
    columns = model.head(torch.eye(config.hidden_size))
    assert torch.equal(columns.T, whole["model.embed_tokens.weight"].float())
    assert torch.equal(model.embedding(torch.arange(card.vocab_size)), whole["model.embed_tokens.weight"].float())


def test_a_bias_held_by_rank_0_only_is_not_superfluous_elsewhere(tmp_path: Path) -> None:
    bias = torch.randn(8)
    save_file({"o.weight": torch.randn(8, 64), "o.bias": bias}, tmp_path / SINGLE)
    for rank in range(2):
        sharding = Sharding(rank, 2, torch.float32, None)
        model = RowParallelLinear("o", 64, 8, sharding, span=sharding.cut(64).spans[rank], bias=True)
        load(model, tmp_path)
        assert model.bias is not None
        assert torch.equal(model.bias.data, bias[: 8 * (rank == 0)])


def test_loaded_pages_leave_resident_memory(tmp_path: Path) -> None:
    """48 MB cut by columns: a rank touches every page of the file, and none remains resident."""
    save_file({"o.weight": torch.ones(4096, 6144, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    sharding = Sharding(0, 3, torch.bfloat16, None)
    model = RowParallelLinear("o", 6144, 4096, sharding, span=sharding.cut(6144).spans[0])
    checkpoint = Checkpoint(tmp_path)
    before = resident(tmp_path / SINGLE)
    checkpoint.read("o.weight", (slice(0, 4096), slice(0, 8))).float().sum()
    assert resident(tmp_path / SINGLE) > before + (16 << 20)
    load_weights(model, checkpoint, ignore=nothing, progress=False)
    assert resident(tmp_path / SINGLE) < 1 << 20


def resident(path: Path) -> int:
    """Return the resident bytes of a mapped file."""
    blocks = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(block.split("Rss:")[1].split()[0]) * 1024 for block in blocks)


# ---- disagreement: refused before anything is allocated or read


@pytest.fixture
def model_dir(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refusal(model_dir: Path, monkeypatch: pytest.MonkeyPatch, ignore: Callable[[str], bool] = nothing) -> str:
    def fail(*args: object) -> None:
        raise AssertionError("allocated or read")

    for parameter in (PackedParameter, PlainParameter):
        monkeypatch.setattr(parameter, "allocate", fail)
    monkeypatch.setattr(Checkpoint, "read", fail)
    with pytest.raises(CheckpointError) as caught:
        load(build_model(read_card(model_dir), SINGLE_RANK), model_dir, ignore)
    return str(caught.value)


def rewrite(model_dir: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
    """Change, add or (change=None) remove one tensor of a checkpoint; return its file."""
    index = json.loads((model_dir / INDEX).read_text())
    file: Path = model_dir / index["weight_map"].setdefault(name, "model-00002-of-00002.safetensors")
    held = load_file(file)
    if change is None:
        del held[name], index["weight_map"][name]
    else:
        held[name] = change(held.get(name, torch.zeros(4)))
    save_file(held, file)
    (model_dir / INDEX).write_text(json.dumps(index))
    return file


def test_missing_tensor(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        rewrite(model_dir, name, None)
    sentence = refusal(model_dir, monkeypatch)
    assert (
        sentence
        == f"{model_dir}: the model needs tensor model.layers.1.mlp.up_proj.weight (and 1 more), found in no file"
    )


def test_superfluous_tensor(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = rewrite(model_dir, "model.layers.9.extra", lambda old: old)
    sentence = refusal(model_dir, monkeypatch)
    assert sentence == f"{file}: the model has no place for tensor model.layers.9.extra"


def test_superfluous_tensor_that_the_model_ignores(model_dir: Path) -> None:
    rewrite(model_dir, "model.layers.9.extra", lambda old: old.to(torch.int8))
    load(build_model(read_card(model_dir), SINGLE_RANK), model_dir, lambda name: name.startswith("model.layers.9."))


def test_wrong_shape(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    file = rewrite(model_dir, name, lambda old: old[:, :-1].contiguous())
    assert refusal(model_dir, monkeypatch) == f"{file}: tensor {name}: expected shape [112, 352], found [112, 351]"


def test_wrong_dtype(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    file = rewrite(model_dir, name, lambda old: old.to(torch.float8_e4m3fn))
    sentence = refusal(model_dir, monkeypatch)
    assert sentence == f"{file}: tensor {name}: expected one of BF16, F16, F32, found F8_E4M3"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """The sentence names the file, the tensor and the element; the rank that holds the column finds it."""
    weight = torch.ones(8, 64, dtype=dtype)
    weight[5, 40] = value
    save_file({"o.weight": weight}, tmp_path / SINGLE)
    for rank in range(2):
        sharding = Sharding(rank, 2, torch.bfloat16, None)
        model = RowParallelLinear("o", 64, 8, sharding, span=sharding.cut(64).spans[rank])
        if rank == 0:
            load(model, tmp_path)
            continue
        with pytest.raises(CheckpointError) as caught:
            load(model, tmp_path)
        found = f"expected finite numbers, found {value} at [5, 40]"
        assert str(caught.value) == f"{tmp_path / SINGLE}: tensor o.weight: {found}"


def test_a_sum_that_overflows_is_no_refusal(tmp_path: Path) -> None:
    weight = torch.full((8, 64), 60000.0, dtype=torch.float16)
    save_file({"o.weight": weight}, tmp_path / SINGLE)
    load(RowParallelLinear("o", 64, 8, SINGLE_RANK, span=SINGLE_RANK.cut(64).spans[0]), tmp_path)


def test_optional_tensor(tmp_path: Path) -> None:
    class Optional(RMSNorm):
        def rectangles(self) -> Any:
            for rectangle in super().rectangles():
                yield replace(rectangle, optional=True)

    save_file({}, tmp_path / SINGLE)
    model = Optional("n", 4, 1e-5, SINGLE_RANK)
    assert load(model, tmp_path).tensors == 0
    assert model.weight.data.tolist() == [0.0] * 4
    save_file({"n.weight": torch.ones(4)}, tmp_path / SINGLE)
    load(model, tmp_path)
    assert model.weight.data.tolist() == [1.0] * 4


# ---- memory

BIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of 2.2 GB in the layout of Llama, one file for each layer, written one at a time."""
    out = tmp_path_factory.mktemp("big")
    (out / "config.json").write_text(json.dumps(BIG))
    card = read_card(out)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for rectangle in build_model(card, Sharding(0, 1, torch.bfloat16, None)).rectangles():
        parts = rectangle.name.split(".")
        shapes.setdefault(parts[2] if parts[1] == "layers" else parts[-2], {})[rectangle.name] = rectangle.shape
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for group, members in shapes.items():
        weights = {
            name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for name, shape in members.items()
        }
        save_file(weights, out / f"model-{group}.safetensors")
        weight_map |= dict.fromkeys(members, f"model-{group}.safetensors")
    (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert sum(path.stat().st_size for path in out.iterdir()) > 2_000_000_000
    yield out
    shutil.rmtree(out)


def load_in_a_process(big: Path, *arguments: object) -> Any:
    """Return the report of load_rank.py."""
    command = [sys.executable, load_rank.__file__, str(big), *map(str, arguments)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    answer = json.loads(done.stdout)
    print(
        f"{arguments}: {answer['nbytes'] / 1e6:.0f} MB packed, peak {answer['peak'] / 1e6:.0f} MB, "
        f"{answer['bytes_read'] / 1e6:.0f} MB read in {answer['seconds']:.1f} s"
    )
    return answer


@pytest.mark.long
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (0, 3), (2, 3)])
def test_peak_memory_of_a_rank(big: Path, rank: int, size: int) -> None:
    """The peak is at most the packed shard, 10 % more, and 300 MB, most of which is torch itself."""
    answer = load_in_a_process(big, rank, size)
    assert answer["peak"] <= 1.1 * answer["nbytes"] + 300e6
    assert answer["nbytes"] < 1.25 * 2.2e9 / size
    last = "model.layers.21.self_attn.q_proj.weight"
    [file] = [path for path in big.glob("*.safetensors") if path.name == "model-21.safetensors"]
    assert answer["row"] == load_file(file)[last][answer["first_row"]].tolist()


@pytest.mark.long
@pytest.mark.parametrize("codes", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_peak_memory_of_a_rank_that_quantises(big: Path, rank: int, size: int, codes: str) -> None:
    """The same bound for a quantised shard, half the size or less; embedding and head are an eighth of the model."""
    answer = load_in_a_process(big, rank, size, codes)
    assert answer["peak"] <= 1.1 * answer["nbytes"] + 300e6
    assert answer["nbytes"] < (0.4 if codes == "int4" else 0.6) * 2.2e9 / size
