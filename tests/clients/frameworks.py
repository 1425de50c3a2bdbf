"""LangChain, LiteLLM and llm against a server: python frameworks.py URL. Prints a line a check; a failure ends it.

They are not installed beside tilerank: test_frameworks.py makes an environment for them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import litellm
import pydantic
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
USER = {"role": "user", "content": "When?"}


class Person(pydantic.BaseModel):
    name: str


def now(zone: str) -> str:
    """Return the time in a zone."""
    return "noon"


def langchain(name: str, model: Any) -> None:
    """Ask a model, stream it, and run the loop of an agent."""
    assert "Moses came." in str(model.invoke("Who?").content)
    chunks = list(model.stream("Who?"))
    assert "Moses came." in str(sum(chunks[1:], chunks[0]).content)
    turns = create_agent(model, [now]).invoke({"messages": [USER]})["messages"]
    assert "It is noon." in str(turns[-1].content) and len(turns) == 4, turns
    print(f"ok: langchain, {name}")


def lite(model: str, base: str) -> None:
    fields = {"model": model, "api_base": base, "api_key": "any", "messages": [USER], "max_tokens": 100}
    assert litellm.completion(**fields).choices[0].message.content == "Moses came."
    calls = litellm.completion(**fields, tools=[TOOL]).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["now"]
    print(f"ok: litellm, {model}")


def main(url: str) -> None:
    api = f"{url}/v1"
    chat, responses = (
        ChatOpenAI(model="it", base_url=api, api_key="any", use_responses_api=newer) for newer in (False, True)
    )
    langchain("chats", chat)
    langchain("responses", responses)
    langchain("messages", ChatAnthropic(model="it", base_url=url, api_key="any", max_tokens=100))
    for model in (chat, responses):
        assert model.with_structured_output(Person).invoke("JSON please") == Person(name="Moses")
    print("ok: langchain, objects")
    lite("openai/it", api)
    lite("hosted_vllm/it", api)
    lite("anthropic/it", url)
    answer = litellm.responses(model="openai/it", api_base=api, api_key="any", input="Who?")
    assert answer.output_text == "Moses came."
    print("ok: litellm, responses")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(
            f"- model_id: it\n  model_name: it\n  api_base: {api}\n  api_key_name: any\n"
        )
        command = [str(Path(sys.executable).parent / "llm"), "-m", "it", "--key", "any", "Who?"]
        environment = os.environ | {"LLM_USER_PATH": folder}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.stdout.strip() == "Moses came.", ran.stdout + ran.stderr
    print("ok: llm")


main(sys.argv[1])
