"""An agent of openai-agents with `stree-jax serve`: calls of a tool, a typed answer.

Prints each call with its result, then the answer as an object.
Run it: start the server as docs/examples.md says, then python examples/agent.py
"""

import argparse
import asyncio
from typing import Annotated, Literal

from agents import (  # pip install openai-agents
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

SKIES = {"Oslo": "rain", "Rome": "sun"}
MOST_CALLS = 2  # then the tool is gone, so that any model comes to an answer


class Report(BaseModel):
    """The form of the answer. Limits keep texts of small models short."""

    city: Literal["Oslo", "Rome"]
    umbrella: bool
    advice: Annotated[str, Field(max_length=40)]


def may_call(run: RunContextWrapper[list], agent: Agent) -> bool:
    return len(run.context) < MOST_CALLS


@function_tool(is_enabled=may_call)
def weather(
    run: RunContextWrapper[list],
    city: Literal["Oslo", "Rome"],
    days: Annotated[int, Field(ge=1, le=5)],
) -> str:
    """Returns the weather of a city in some days."""
    run.context.append((city, days))
    print(f"weather({city!r}, {days}) -> {SKIES[city]!r}")
    return SKIES[city]


async def answer(client: AsyncOpenAI, question: str) -> Report:
    served = [model.id async for model in client.models.list()]
    # The first answer must be a call. The next ones may be, or are a `Report`.
    choice = dict(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="weather",
        instructions="Look up the weather, then answer.",
        model=OpenAIChatCompletionsModel(served[0], client),
        model_settings=ModelSettings(**choice, temperature=0),
        tools=[weather],
        output_type=Report,
    )
    done = await Runner.run(agent, question, context=[])
    return done.final_output


async def run(args: argparse.Namespace) -> None:
    # Until the server has started, requests fail; the client tries them again.
    options = dict(base_url=args.url, api_key=args.key, max_retries=10)
    async with AsyncOpenAI(**options) as client:
        print(repr(await answer(client, args.question)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="an API key")
    parser.add_argument("--question", default="Do I need an umbrella in Oslo?")
    args = parser.parse_args()
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
