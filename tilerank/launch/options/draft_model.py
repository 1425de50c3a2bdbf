"""The model of --draft-model, before anything of it is loaded."""

from pathlib import Path

from tilerank.loader.errors import show
from tilerank.loader.tokenizer import Tokenizer

from ..errors import LaunchError


def check_draft_model(draft_model: Path | None, tokenizer: Tokenizer) -> None:
    """Raise LaunchError for a draft model, if there is one, whose token ids do not mean those of `tokenizer`.

    Ids that only one of the two has are allowed: models of a family have embeddings of different lengths.
    """
    if draft_model is None:
        return
    if (difference := tokenizer.first_difference(Tokenizer(draft_model))) is not None:
        id, expected, found = difference
        raise LaunchError(
            f"--draft-model {draft_model}: expected the vocabulary of {tokenizer.model_dir}, in which token {id} is "
            f"{show(expected)}, found {show(found)}"
        )
