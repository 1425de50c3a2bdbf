"""Trains a multi-token-prediction head for a Llama or a Qwen3, and writes the model with it.

    python -m benchmarks.train_draft_head MODEL_DIR OUT_DIR
    tilerank bench speculative OUT_DIR --speculative mtp

OUT_DIR is a checkpoint of GLM-4.5: a Llama is one whose layers are all dense, and so is a Qwen3, with norms of its
heads. The head learns what the model predicts after the next token, in its greedy answers to questions on some topics
and to requests on parts of the text of `tilerank bench quality`. It is trained in the layer of transformers.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from tilerank import LLM, SamplingParams
from tilerank.launch.bench.scoring.text import DEFAULT_TEXT

QUESTIONS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What should everybody know about {}?",
    "Write a Python function that has to do with {}.",
    "Summarise the history of {} in a few sentences.",
    "Write a letter to a friend about {}.",
    "Describe {} as JSON with a few fields.",
)
TOPICS = (
    *("bread", "the moon", "sorting numbers", "rivers", "trains", "chess", "bees", "the weather", "music", "gardens"),
    *("a bakery", "volcanoes", "libraries", "prime numbers", "the sea", "bicycles", "cats", "maps", "electricity"),
    *("glass", "a village", "dates and times", "forests", "bridges", "photography", "snow", "football", "strings"),
    *("paper", "the heart", "airports", "temperatures"),
)
REQUESTS = (
    "Repeat this text word by word.\n\n{}",
    "Here is a text.\n\n{}\n\nQuote its first sentence, then summarise the rest.",
    "Correct the mistakes in this text and return all of it.\n\n{}",
)
PART_LETTERS = 800
QK_NORMS = {"llama": False, "qwen3": True}
"""The families that GLM-4.5 contains, and whether they normalise heads."""
EXPERTS = 2
"""Experts of the head, all of which every token takes, and one more for all tokens. A GLM-4.5 has no dense layer after
the first sparse one."""
BATCH = 4
HELD_OUT = 16
"""One text of so many is not trained on."""


@dataclass(frozen=True)
class Example:
    """A text, of which the first `start` tokens are the prompt.

    ids: [n]. hidden: [n - 1, hidden] of all tokens but the last, after the model's last norm.
    """

    ids: Tensor
    hidden: Tensor
    start: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="must not exist yet")
    parser.add_argument("--new-tokens", type=int, default=200, metavar="N", help="of an answer (default: 200)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the answers (default: 8)")
    args = parser.parse_args(argv)
    if args.out.exists():
        sys.exit(f"{args.out}: expected a directory that does not exist yet")
    config = config_with_head(args.model)
    torch.manual_seed(0)
    texts = answers(args.model, args.new_tokens)
    print(f"{len(texts)} answers, {sum(len(ids) - start for ids, start in texts)} tokens", flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.eval()
    head = new_head(config, model)
    train(head, model, [example(model, ids, start) for ids, start in texts], args.epochs)
    write(args.model, args.out, config, head)
    return 0


def answers(model_dir: Path, new_tokens: int) -> list[tuple[list[int], int]]:
    """Return the tokens of chats with two or more of an answer, and how many of them are the prompt."""
    text = DEFAULT_TEXT.read_text()
    parts = [text[start : start + PART_LETTERS] for start in range(0, len(text), PART_LETTERS)]
    asked = [*product(QUESTIONS, TOPICS), *product(REQUESTS, parts)]
    chats = [[{"role": "user", "content": request.format(about)}] for request, about in asked]
    with LLM(model_dir, max_model_len=1024) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=new_tokens), use_tqdm=False)
    texts = [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]
    return [(prompt + answer, len(prompt)) for prompt, answer in texts if len(answer) > 1]


def config_with_head(source: Path) -> dict[str, Any]:
    """Return the fields of config.json of the model with a head."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config["model_type"] not in QK_NORMS:
        found = config["model_type"]
        sys.exit(f"{source / 'config.json'}: model_type: expected {' or '.join(QK_NORMS)}, found {found!r}")
    return config | {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "first_k_dense_replace": config["num_hidden_layers"],
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": config["intermediate_size"] // 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(EXPERTS),
        "partial_rotary_factor": 1.0,
        "use_qk_norm": QK_NORMS[config["model_type"]],
        "num_nextn_predict_layers": 1,
    }


def new_head(config: dict[str, Any], model: Any) -> MtpLayer:
    """Return a head that adds the embedding and the hidden state and has no layer yet, as far as its sums go."""
    of_head = Glm4MoeConfig.from_dict(config | {"first_k_dense_replace": 0})
    of_head._attn_implementation, of_head._experts_implementation = "sdpa", "eager"
    head = MtpLayer(of_head, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, 0)
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        for name, x in parameters.items():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight", "gate.weight")):
                torch.nn.init.zeros_(x)
            elif x.ndim > 1:
                torch.nn.init.normal_(x, std=0.02)
        parameters["eh_proj.weight"].add_(torch.eye(of_head.hidden_size).repeat(1, 2))
        parameters["post_norm.weight"].copy_(model.model.norm.weight)
    return head


@torch.no_grad()
def example(model: Any, ids: Sequence[int], start: int) -> Example:
    text = torch.tensor(ids)
    return Example(text, model.model(text[None, :-1]).last_hidden_state[0].clone(), start)


def train(head: MtpLayer, model: Any, examples: Sequence[Example], epochs: int) -> list[float]:
    """Return the mean divergence of each epoch, and print it with the share of right drafts in texts held out."""
    # The losses of tokens that never occur would take most of the time.
    used = torch.unique(torch.cat([one.ids[one.start :] for one in examples]))
    embeddings, weight = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()[used]

    def logits(one: Example) -> tuple[Tensor, Tensor]:
        """Return those of the head and of the model for the tokens of the answer but the first: [tokens, used]."""
        following, hidden, first = one.ids[1:-1], one.hidden.float(), one.start - 1
        with torch.no_grad():
            embedded, positions = embeddings[following][None].float(), torch.arange(len(following))[None]
            rotary = model.model.rotary_emb(embedded, positions)
        with torch.autocast("cpu", torch.bfloat16):
            x = head(embedded, hidden[None, :-1], rotary, None, positions, None)[0, first:]
            return (x @ weight.T).float(), (hidden[1 + first :] @ weight.T).float()

    def loss_of(one: Example) -> Tensor:
        drafted, wanted = logits(one)
        return kl_div(drafted.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)

    def are_right(one: Example) -> Tensor:
        drafted, wanted = logits(one)
        return drafted.argmax(-1) == wanted.argmax(-1)

    held_out, rest = examples[::HELD_OUT], [one for i, one in enumerate(examples) if i % HELD_OUT]
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.01)
    steps = epochs * -(-len(rest) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    means = list[float]()
    for epoch in range(1, epochs + 1):
        began, losses = time.monotonic(), list[float]()
        for batch in batches(rest):
            loss: Any = torch.stack([loss_of(one) for one in batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        with torch.no_grad():
            right = torch.cat([are_right(one) for one in held_out])
        seconds = time.monotonic() - began
        print(
            f"epoch {epoch}: divergence {means[-1]:.3f}, {right.float().mean():.3f} right, {seconds:.0f} s", flush=True
        )
    return means


def batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    order = torch.randperm(len(examples)).tolist()
    for start in range(0, len(order), BATCH):
        yield [examples[i] for i in order[start : start + BATCH]]


def stored(head: MtpLayer, module: str) -> dict[str, Tensor]:
    """Return the tensors of the head as a checkpoint names them, with its experts one by one."""
    tensors = dict[str, Tensor]()
    for name, x in head.state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for expert, (gate, up) in enumerate(each.chunk(2) for each in x):
                tensors |= {f"mlp.experts.{expert}.gate_proj.weight": gate, f"mlp.experts.{expert}.up_proj.weight": up}
        elif name == "mlp.experts.down_proj":
            tensors |= {f"mlp.experts.{expert}.down_proj.weight": each for expert, each in enumerate(x)}
        else:
            tensors[name] = x
    return {f"{module}.{name}": x.to(torch.bfloat16).contiguous() for name, x in tensors.items()}


def write(source: Path, out: Path, config: dict[str, Any], head: MtpLayer) -> None:
    """Write the model and its tokenizer, with the head as the layer after the last."""
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: x for file in source.glob("*.safetensors") for name, x in load_file(file).items()}
    tensors |= stored(head, f"model.layers.{config['num_hidden_layers']}")
    save_file(tensors, out / "model.safetensors")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
