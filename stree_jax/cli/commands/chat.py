"""`stree-jax chat`: its options."""

import argparse
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.devices import add_mesh_option
from stree_jax.cli.options import add, add_pair_options, group
from stree_jax.cli.text_options import (
    add_keep_option,
    add_memory_option,
    add_text_options,
)
from stree_jax.common.heap import no_collection

NOTES = notes(
    """
/help lists the commands of a chat, such as /regen, /undo, /save and /set. Paste a
message of several lines, or begin and end it with three double quotes. Ctrl-C ends an
answer or clears the line; /bye, Ctrl-D or the end of the input ends the chat. Piped
text is one message on each line, or a single one with --prompt or --file -.""",
    "stree-jax chat --model OWNER/NAME --system 'Answer briefly.'",
    "stree-jax chat --model smollm2 -p 'What does this do?' < script.sh",
    "stree-jax chat --model model-Q4_K_M.gguf --memory 8GB --context 512 --queries 20",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_pair_options(p)
    add_text_options(p, None)
    add_conversation_options(p)
    add_memory_option(p)
    add_keep_option(p)
    add_mesh_option(p)


def add_conversation_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a chat."""
    conversation = group(p, "Conversation")
    text = "system message, for models with a chat template"
    add(conversation, "--system", str, None, text, metavar="TEXT")
    text = "answer this message and end; text piped to standard input follows it"
    conversation.add_argument("-p", "--prompt", metavar="TEXT", help=text)
    text = "answer the message in this UTF-8 file (- is standard input), after that of "
    text += "--prompt, and end"
    add(conversation, "--file", Path, None, text, metavar="FILE")
    text = "most tokens of the conversation, or of each of its --queries"
    add(conversation, "--context", int, 4096, text)
    text = "with --memory: prompts and answers of --context tokens that fit in one "
    add(conversation, "--queries", int, 1, text + "conversation")
    text = "do not keep typed lines in chat_history of the cache folder"
    conversation.add_argument("--no-history", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    with no_collection():
        from stree_jax.cli.chat_run import run_chat

    return run_chat(args)
