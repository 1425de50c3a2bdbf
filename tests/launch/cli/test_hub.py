"""Models by their id, against a stand-in of the hub on the loopback interface and against a filled cache."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import DEMO, Result, demo_without_tokenizer, run
from hub import COMMIT, Hub

from tests.loader.gguf_files import Tensors, write_gguf
from tests.runtime.gguf.mmproj_files import QWEN, QWEN_MMPROJ, QWEN_TOWER, write_pair
from tests.runtime.gguf.tiny_llama import HIDDEN, METADATA, VOCAB

MODEL = "demo/lm"
WEIGHTS = DEMO / "model.safetensors"
UNREACHABLE = "http://127.0.0.1:9"
GENERATE = ("--prompt", "In the beginning", "--max-new-tokens", 4)
NORM = ("F32", (HIDDEN,), bytes(HIDDEN * 4))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    hub = Hub({MODEL: DEMO, "demo/pickled": pickled})
    yield hub
    hub.close()


def generate(model: str, home: Path, endpoint: str, *arguments: object, offline: int = 0) -> Result:
    return run("generate", model, *GENERATE, *arguments, env=environment(home, endpoint, offline))


def plan(model: str, home: Path, endpoint: str, offline: int = 0) -> Result:
    """Finds the model as `generate` does, and starts no ranks."""
    return run("plan", model, "--json", env=environment(home, endpoint, offline))


def environment(home: Path, endpoint: str, offline: int) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": str(offline)}


def test_an_id_is_downloaded_once_and_then_found_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    """So are the files of a tokenizer, without the weights beside them, and those of a draft model."""
    bare = demo_without_tokenizer(tmp_path / "bare")
    split = generate(str(bare), tmp_path / "tokenizer", hub.url, "--tokenizer", MODEL)
    assert split.status == 0 and not any(path.endswith(".safetensors") for _, path in hub.requests), split.err
    first = generate(MODEL, tmp_path, hub.url, "--tp", 2, "--draft-model", MODEL)
    assert first.status == 0 and first.out == split.out != "\n", first.err
    assert "demo/lm: downloading 12.3 MiB into" in first.err
    assert "tokens of the draft model are drafted where that pays" in first.err
    weights = f"/{MODEL}/resolve/{COMMIT}/model.safetensors"
    assert hub.requests.count(("GET", weights)) == 1
    again = plan(MODEL, tmp_path, hub.url)
    assert again.status == 0 and "downloading" not in again.err
    assert hub.requests.count(("GET", weights)) == 1
    asked = len(hub.requests)
    offline, unreachable = plan(MODEL, tmp_path, hub.url, offline=1), plan(MODEL, tmp_path, UNREACHABLE)
    assert len(hub.requests) == asked
    found = [json.loads(result.out)["model"] for result in (again, offline, unreachable)]
    assert len(set(found)) == 1 and (Path(found[0]) / "model.safetensors").read_bytes() == WEIGHTS.read_bytes()


def test_processes_that_another_launcher_starts_download_once(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    with ThreadPoolExecutor() as pool:
        plans = list(pool.map(lambda _: run("plan", MODEL, "--json", env=env), range(3)))
    assert [plan.status for plan in plans] == [0, 0, 0], plans[0].err
    assert hub.requests.count(("GET", f"/{MODEL}/resolve/{COMMIT}/model.safetensors")) == 1


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        (
            "demo/none",
            (),
            "the hub has no model demo/none, or it is private .* demo/none is no directory here either.*",
        ),
        (MODEL, ("--revision", "v9"), "demo/lm on the hub has no revision v9"),
        ("demo/pickled", (), "demo/pickled on the hub: expected a .safetensors file, found config.json"),
        (str(DEMO), ("--revision", "main"), "--revision is for an id on the hub; this model is a directory"),
        (str(DEMO), ("--tokenizer", "nowhere"), "--tokenizer: nowhere is not a directory; expected one .*"),
        (str(DEMO), ("--tokenizer", "demo/none"), "the hub has no model demo/none, or it is private .*"),
        (str(DEMO), ("--draft-model", "nowhere"), "nowhere is not a directory; expected one .*"),
        ("nowhere", (), "nowhere is not a directory; expected one .*, or an id on the hub such as .*"),
    ],
)
def test_what_is_no_model_is_refused(
    hub: Hub, tmp_path: Path, model: str, arguments: tuple[str, ...], sentence: str
) -> None:
    assert_refused(generate(model, tmp_path, hub.url, *arguments), sentence)


def test_without_the_hub_and_without_a_copy(tmp_path: Path) -> None:
    assert_refused(generate(MODEL, tmp_path, UNREACHABLE), "the cache does not hold .* hub cannot be reached; .*")
    assert_refused(generate(MODEL, tmp_path, UNREACHABLE, offline=1), "the cache does not hold .*OFFLINE is set; .*")


def test_a_model_larger_than_the_disk(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    assert_refused(generate(MODEL, tmp_path, hub.url), "demo/lm on the hub: .* to download, but .* free; HF_HOME .*")
    assert not any(method == "GET" and path.endswith(".safetensors") for method, path in hub.requests)


def assert_refused(result: Result, sentence: str) -> None:
    assert result.status == 1
    assert re.fullmatch(f"tilerank: error: {sentence}", result.errors[-1]), result.err


@pytest.fixture
def quantised(tmp_path: Path) -> Iterator[Hub]:
    """A hub with GGUF files of two quantisations of a model, the second in two parts, and a file that is no model."""
    folder = tmp_path / "gguf"
    folder.mkdir()
    tensors: Tensors = {"token_embd.weight": ("F32", (VOCAB, HIDDEN), bytes(VOCAB * HIDDEN * 4))}
    write_gguf(folder / "m.Q8_0.gguf", METADATA, tensors)
    for part, (metadata, held) in enumerate(((METADATA, tensors), ({}, {"output_norm.weight": NORM}))):
        numbers = {"split.no": part, "split.count": 2, "split.tensors.count": 2}
        write_gguf(folder / f"m-UD-q4_k_xl-{part + 1:05}-of-00002.gguf", metadata | numbers, held)
    (folder / "mmproj-m-Q8_0.gguf").write_bytes(b"GGUF")
    sees = tmp_path / "sees"
    sees.mkdir()
    write_pair(sees, QWEN, QWEN_MMPROJ, QWEN_TOWER, "m-Q8_0")
    for name in ("mmproj-F16", "mmproj-BF16"):
        write_gguf(sees / f"{name}.gguf", QWEN_MMPROJ, QWEN_TOWER)
    hub = Hub({"demo/gguf": folder, "demo/sees": sees})
    yield hub
    hub.close()


def test_a_quantisation_of_an_id_is_downloaded_alone(quantised: Hub, tmp_path: Path) -> None:
    found = plan("demo/gguf:Q4_K_XL", tmp_path, quantised.url)
    assert found.status == 0, found.err
    path = Path(json.loads(found.out)["model"])
    assert path.name == "m-UD-q4_k_xl-00001-of-00002.gguf"
    assert sorted(held.name[-19:] for held in path.parent.iterdir()) == ["00001-of-00002.gguf", "00002-of-00002.gguf"]
    again = plan("demo/gguf:q4_k_xl", tmp_path, UNREACHABLE, offline=1)
    assert again.status == 0 and json.loads(again.out)["model"] == str(path), again.err
    assert_refused(
        plan("demo/gguf:Q8_0", tmp_path, UNREACHABLE, offline=1),
        "the cache of demo/gguf: expected GGUF files of Q8_0, found those of UD-q4_k_xl; HF_HUB_OFFLINE is set, and "
        r"`hf download demo/gguf --include '\*Q8_0\*.gguf'` fetches it",
    )


def test_a_quantisation_is_downloaded_with_its_mmproj_file(quantised: Hub, tmp_path: Path) -> None:
    found = plan("demo/sees:Q8_0", tmp_path, quantised.url)
    assert found.status == 0, found.err
    path = Path(json.loads(found.out)["model"])
    assert sorted(held.name for held in path.parent.iterdir()) == ["m-Q8_0.gguf", "mmproj-BF16.gguf"]
    offline = plan("demo/sees:Q8_0", tmp_path, UNREACHABLE, offline=1)
    assert offline.status == 0, offline.err
    for report in map(json.loads, (found.out, offline.out)):
        assert report["model_type"] == "qwen3_vl" and report["media"] > 0


def test_a_quantisation_that_the_hub_does_not_have(quantised: Hub, tmp_path: Path) -> None:
    assert_refused(
        plan("demo/gguf:Q4_0", tmp_path, quantised.url),
        "demo/gguf on the hub: expected GGUF files of Q4_0, found those of UD-q4_k_xl, Q8_0",
    )
    assert_refused(
        plan("demo/gguf", tmp_path, quantised.url),
        "demo/gguf on the hub has GGUF files: expected their quantisation as well, such as demo/gguf:UD-q4_k_xl, one "
        "of UD-q4_k_xl, Q8_0",
    )


def test_a_folder_of_several_models(tmp_path: Path) -> None:
    for name in ("a.Q8_0.gguf", "a.Q4_0-00001-of-00002.gguf", "a.Q4_0-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert_refused(
        run("plan", tmp_path),
        f"{tmp_path} has several models: a.Q4_0-00001-of-00002.gguf, a.Q8_0.gguf; expected the path of one",
    )
