"""The number of pages for keys and values of encodings, on which all ranks agree."""

import torch

from tilerank.parallel.group import Group

from ..step.cache import bytes_per_source_page, has_sources
from ..step.model import Model


def source_pages(model: Model, group: Group, nbytes: int) -> int:
    """Return how many pages of encodings fit in so many bytes on every rank, at least one for a model with
    cross-attention, and 0 for others. A collective."""
    specs = model.cache_specs()
    if not has_sources(specs):
        return 0
    pages = nbytes // max(bytes_per_source_page(specs), 1) if model.encoder else 0
    return max(1, int(group.all_gather(torch.tensor([pages])).min()))
