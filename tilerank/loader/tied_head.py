"""Whether the output head of a checkpoint is its embedding. The tensors decide, and config.json only without them.

No torch: plans ask before anything is loaded. Some files have a head of other values in spite of `tie_word_embeddings`,
some repeat the embedding as a head, and some have the head alone.
"""

from pathlib import Path

from .headers import StoredTensor, stored_tensors

_PIECE = 1 << 24


def tied_module(model_dir: Path, embedding: str, head: str, *, announced: bool) -> str | None:
    """Return the name of the module whose weight is embedding and head; None if each has its own.

    embedding, head: the names of the modules. announced: whether config.json ties them.
    """
    if not announced:
        return None
    tensors = stored_tensors(model_dir)
    if tensors is None or not any(name.startswith(f"{head}.") for name in tensors):
        return embedding
    of_embedding, of_head = tensors.get(f"{embedding}.weight"), tensors.get(f"{head}.weight")
    if of_embedding is None or of_head is None:
        return head if of_embedding is None else None
    return embedding if _are_equal(of_embedding, of_head) else None


def _are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare the bytes of two tensors, piece by piece."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as file, b.file.open("rb") as other:
        file.seek(a.begin)
        other.seek(b.begin)
        for start in range(a.begin, a.end, _PIECE):
            size = min(_PIECE, a.end - start)
            if file.read(size) != other.read(size):
                return False
    return True
