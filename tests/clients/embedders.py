"""LangChain and LlamaIndex against a server that embeds: python embedders.py URL VECTORS. A failure ends it.

VECTORS: the right vector of each text, a JSON object. Prints a line a check.
"""

import json
import sys
from typing import Any

from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


def main(url: str, vectors: dict[str, list[float]]) -> None:
    api, texts, (first, right) = f"{url}/v1", list(vectors), next(iter(vectors.items()))
    # By default it fetches a vocabulary of OpenAI, and sends its tokens.
    chain: Any = OpenAIEmbeddings(model="it", base_url=api, api_key="any", check_embedding_ctx_length=False)
    assert chain.embed_documents(texts, chunk_size=7) == list(vectors.values())
    assert chain.embed_query(first) == right
    print("ok: langchain")
    index: Any = OpenAILikeEmbedding(model_name="it", api_base=api, api_key="any", embed_batch_size=7)
    assert index.get_text_embedding_batch(texts) == list(vectors.values())
    assert index.get_query_embedding(first) == right
    print("ok: llama-index")


main(sys.argv[1], json.loads(sys.argv[2]))
