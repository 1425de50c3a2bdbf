"""tilerank: a tensor-parallel runtime that serves large language models on CPU servers.

The rooms, each of which imports only what stands to its right:

    launch  ->  runtime  ->  loader  ->  parallel  ->  kernels
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launch.llm.llm import LLM
    from .launch.llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what scripts use once they use it, so that `import tilerank` takes no time."""
    if name == "LLM":
        from .launch.llm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from .launch.llm.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
