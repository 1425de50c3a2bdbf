"""Trains a multi-token-prediction head for a Llama or a Qwen3, and writes the model with it.

    python -m benchmarks.train_draft_head MODEL_DIR OUT_DIR
    tilerank bench speculative OUT_DIR --speculative mtp

OUT_DIR is a checkpoint of GLM-4.5: a Llama is one whose layers are all dense, and so is a Qwen3, with norms of its
heads. The head learns what the model predicts after the next token, in its greedy answers to some requests
(draft_head_requests.py). It is trained in the layer of transformers, and drafts tokens that are frequent in these
answers.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import kl_div, smooth_l1_loss
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from tilerank import LLM, SamplingParams
from tilerank.launch.options.arguments import whole_number

from .draft_head_requests import requests

QK_NORMS = {"llama": False, "qwen3": True}
"""The families that GLM-4.5 contains, and whether they normalise heads."""
EXPERTS = 2
"""Experts of the head, all of which every token takes, and one more for all tokens. A GLM-4.5 has no dense layer after
the first sparse one."""
BATCH = 4
READ_TOGETHER = 64
"""Texts whose hidden states are read together: in float32, they take memory."""
HELD_OUT = 16
"""One text of so many is not trained on."""
STATES_WEIGHT = 1.0
"""Of the distance of the hidden states of the head to those of the model (arXiv 2401.15077), beside the divergence of
what they predict. The head reads its own to draft a second token."""


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
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="passes over the answers (default: 5)")
    parser.add_argument(
        "--draft-vocabulary",
        type=whole_number(1),
        metavar="N",
        help="tokens that the head can draft, the most frequent of the answers (default: a quarter of the vocabulary)",
    )
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"), help="of the model that answers")
    args = parser.parse_args(argv)
    if args.out.exists():
        sys.exit(f"{args.out}: expected a directory that does not exist yet")
    config = config_with_head(args.model)
    torch.manual_seed(0)
    examples = answers(args.model, args.new_tokens, args.quantization)
    print(f"{len(examples)} answers, {sum(len(one.ids) - one.start for one in examples)} tokens", flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.eval()
    head = new_head(config, model)
    vocabulary = frequent_tokens(examples, args.draft_vocabulary or config["vocab_size"] // 4)
    train(head, model, examples, vocabulary, args.epochs)
    write(args.model, args.out, config, head, vocabulary)
    return 0


def answers(model_dir: Path, new_tokens: int, quantization: str | None) -> list[Example]:
    """Return chats with two or more tokens of an answer. quantization: as of `tilerank serve`."""
    chats = [[{"role": "user", "content": request}] for request in requests()]
    with LLM(model_dir, max_model_len=1024, quantization=quantization) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=new_tokens), use_tqdm=False)
        chosen = [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]
        texts = [(prompt + answer, len(prompt)) for prompt, answer in chosen if len(answer) > 1]
        examples = list[Example]()
        for first in range(0, len(texts), READ_TOGETHER):
            some = texts[first : first + READ_TOGETHER]
            found = llm.hidden_states([{"prompt_token_ids": ids[:-1]} for ids, _ in some], use_tqdm=False)
            for (ids, start), one in zip(some, found, strict=True):
                hidden = torch.from_numpy(one.hidden_states[-1]).to(torch.bfloat16)
                examples.append(Example(torch.tensor(ids), hidden, start))
    return examples


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
    """Return a head that passes on the hidden state, and has no layer yet, as far as its sums go."""
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
        hidden = of_head.hidden_size  # the columns after those of the embedding
        parameters["eh_proj.weight"][:, hidden:].add_(torch.eye(hidden))
        parameters["post_norm.weight"].copy_(model.model.norm.weight)
    return head


def train(head: MtpLayer, model: Any, examples: Sequence[Example], vocabulary: Tensor, epochs: int) -> list[float]:
    """Return the mean divergence of each epoch, and print it with the shares of right drafts in texts held out.

    vocabulary: the tokens that the head can draft. It learns what the model predicts among these.
    """
    embeddings, weight = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()[vocabulary]

    def passed(following: Tensor, hidden: Tensor) -> Tensor:
        """Return the states of the head for tokens and the states of the tokens before them: [tokens, hidden]."""
        with torch.no_grad():
            embedded, positions = embeddings[following][None].float(), torch.arange(len(following))[None]
            rotary = model.model.rotary_emb(embedded, positions)
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = head(embedded, hidden[None], rotary, None, positions, None)
        return found[0].float()

    def logits(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = x @ weight.T
        return found.float()

    def losses_of(one: Example) -> tuple[Tensor, Tensor]:
        """Return the divergence of the predictions, and the distance of the states over their mean size, for the tokens
        of the answer but the first."""
        hidden, first = one.hidden.float(), one.start - 1
        drafted, wanted = passed(one.ids[1:-1], hidden[:-1])[first:], hidden[1 + first :]
        predicted, target = logits(drafted).log_softmax(-1), logits(wanted).log_softmax(-1)
        size = wanted.square().mean().sqrt()
        divergence = kl_div(predicted, target, reduction="batchmean", log_target=True)
        return divergence, smooth_l1_loss(drafted / size, wanted / size)

    def are_right(one: Example) -> tuple[Tensor, Tensor]:
        """Return which first drafts are right, and which second ones of those after a right one."""
        drafted, first = passed(one.ids[1:-1], one.hidden[:-1].float()), one.start - 1
        second, wanted = passed(one.ids[2:-1], drafted[:-1]), one.ids[2 + first :]
        right = vocabulary[logits(drafted[first:]).argmax(-1)] == wanted
        return right, (vocabulary[logits(second[first:]).argmax(-1)] == wanted[1:])[right[:-1]]

    held_out, rest = examples[::HELD_OUT], [one for i, one in enumerate(examples) if i % HELD_OUT]
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.01)
    steps = epochs * -(-len(rest) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    means = list[float]()
    for epoch in range(1, epochs + 1):
        began, found = time.monotonic(), list[float]()
        for batch in batches(rest):
            divergences, distances = zip(*map(losses_of, batch), strict=True)
            divergence = torch.stack(divergences).mean()
            loss: Any = divergence + STATES_WEIGHT * torch.stack(distances).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            found.append(divergence.item())
        means.append(sum(found) / len(found))
        with torch.no_grad():
            right = (torch.cat(some).float().mean() for some in zip(*map(are_right, held_out), strict=True))
        shares, seconds = "{:.3f} right, {:.3f} after these".format(*right), time.monotonic() - began
        print(f"epoch {epoch}: divergence {means[-1]:.3f}, {shares}, {seconds:.0f} s", flush=True)
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


def frequent_tokens(examples: Sequence[Example], most: int) -> Tensor:
    """Return the tokens that occur most often in the answers, at most so many, in the order of their ids."""
    answered = torch.cat([one.ids[one.start :] for one in examples])
    tokens, counts = torch.unique(answered, return_counts=True)
    chosen: Tensor
    chosen, _ = tokens[counts.argsort(descending=True, stable=True)[:most]].sort()
    share = counts[torch.isin(tokens, chosen)].sum() / counts.sum()
    print(f"{len(chosen)} tokens can be drafted, which are {share:.3f} of those of the answers", flush=True)
    return chosen


def write(source: Path, out: Path, config: dict[str, Any], head: MtpLayer, vocabulary: Tensor) -> None:
    """Write the model and its tokenizer, with the head as the layer after the last.

    vocabulary: the tokens that the head drafts. Their rows of the output head are stored once more, beside their ids
    (tilerank/runtime/models/mtp.py).
    """
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(vocabulary)}, indent=1))
    tensors = {name: x for file in source.glob("*.safetensors") for name, x in load_file(file).items()}
    module = f"model.layers.{config['num_hidden_layers']}"
    output_head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    ids = vocabulary - torch.arange(len(vocabulary))
    of_vocabulary = {f"{module}.shared_head.head.weight": output_head[vocabulary], f"{module}.d2t": ids}
    tensors |= stored(head, module) | of_vocabulary
    save_file(tensors, out / "model.safetensors")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
